"""The round loop against fake workers: with any draft and any faults, the text is the target's own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core import Part, Plan, Proposal, SessionSetup, Verdict
from coordinator.proposals.drafter import Drafter, DraftStream
from coordinator.proposals.drafts import Drafts
from coordinator.workers import verifier as verifier_module
from coordinator.workers.errors import WorkerError, WorkerLateError
from coordinator.workers.verifier import Verifier
from coordinator.workers.workers import Workers
from specd.errors import ResourceExhaustedError, UnavailableError
from specd.sampling import Sampling
from specd.vocabulary import FinishReason, TokenSource
from tests.unit.fake_workers import (
    CONTEXT_LENGTH,
    END_TOKEN,
    VOCABULARY_SIZE,
    FakeDraft,
    FakeDraftStream,
    FakeTarget,
    FakeTargetStream,
    OnlyRoute,
    decode_with_target_alone,
    drafted,
    make_session,
    next_token,
    plan_of,
    run,
)


@pytest.fixture(autouse=True)
def no_pause_between_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier_module, "_FIRST_PAUSE_SECONDS", 0.0)


tokens = st.integers(0, VOCABULARY_SIZE - 1)
prompts = st.lists(tokens, min_size=1, max_size=8)
max_token_counts = st.integers(1, 40)
draft_lengths = st.integers(0, 9)


def with_few_losses(events: list[str]) -> list[str]:
    """Let a round succeed before the target is lost in it so often that the session fails."""
    kept, losses = [], 0
    for event in events:
        losses = 0 if event == "ok" else losses + (event == "lost")
        kept.append(event if losses < verifier_module._MOST_LOSSES else "ok")
        losses = 0 if kept[-1] == "ok" else losses
    return kept


target_events = st.lists(st.sampled_from(["ok", "ok", "lost", "late", "full"]), max_size=30).map(with_few_losses)
draft_events = st.lists(
    st.sampled_from(["ok", "ok", "lost", "late", "full", "refuses", "short", "foreign", "unsure", "few"]),
    max_size=30,
)
plans = st.lists(
    st.builds(plan_of, draft_lengths, st.integers(0, 9).map(lambda count: (0.5,) * count)),
    min_size=1,
    max_size=8,
)


@st.composite
def draft_choices(draw: st.DrawFn) -> Callable[[list[int]], int]:
    """A draft that is right at some positions and says anything at others, from always right to always wrong."""
    offsets = draw(st.lists(st.integers(0, VOCABULARY_SIZE - 1), min_size=1, max_size=12))
    return lambda token_ids: (next_token(token_ids) + offsets[len(token_ids) % len(offsets)]) % VOCABULARY_SIZE


@settings(max_examples=500)
@given(prompts, max_token_counts, plans, draft_choices(), draft_events, target_events)
def test_what_comes_out_is_what_the_target_alone_decodes(
    prompt: list[int],
    max_tokens: int,
    planned: list[Plan],
    choose: Callable[[list[int]], int],
    draft_faults: list[str],
    target_faults: list[str],
) -> None:
    session = make_session(prompt, max_tokens)
    draft, target = FakeDraft(choose, draft_faults), FakeTarget(target_faults)
    rounds, statistics = run(session, planned, draft, target)

    expected = decode_with_target_alone(prompt, max_tokens)
    assert session.token_ids[len(prompt) :] == expected
    assert [token for round_ in rounds for token in round_.commit.token_ids] == expected
    ended = expected[-1] == END_TOKEN
    assert session.finish_reason is (FinishReason.EOS if ended else FinishReason.LENGTH)
    assert draft.num_open == target.num_open == 0

    assert statistics.generated_tokens == len(expected)
    assert statistics.accepted_tokens + statistics.recovered_tokens + statistics.bonus_tokens == len(expected)
    assert sum(statistics.accepted_by_position) == statistics.accepted_tokens <= statistics.proposed_tokens
    assert statistics.accepted_by_position == sorted(statistics.accepted_by_position, reverse=True)


def test_rounds_for_which_nothing_is_known_of_the_target_alone_say_nothing_of_the_speedup() -> None:
    rounds, statistics = run(make_session([1, 2], 20), 3, FakeDraft(next_token, []), FakeTarget([]))
    known = replace(rounds[1], target_only_seconds=2 * rounds[1].seconds)
    statistics.add(known, arrived_at=0.0)
    assert statistics.speedup == 2


def test_a_target_without_room_is_asked_again_and_then_the_session_can_be_tried_later() -> None:
    session = make_session([1, 2, 3], 5)
    verifier = Verifier(
        OnlyRoute(FakeTarget(["full", "full", "ok", *["full"] * 100])),
        SessionSetup("s", Sampling(), namespace=b""),
        timeout_seconds=1.0,
        recovery_seconds=10.0,
        clock=itertools.count().__next__,
    )

    async def verify_twice() -> None:
        verdict = await verifier.verify(session.token_ids, Proposal())
        assert (verdict.next_token_id, verdict.num_replays) == (next_token([1, 2, 3]), 0)
        with pytest.raises(ResourceExhaustedError) as caught:
            await verifier.verify(session.token_ids, Proposal())
        assert caught.value.reason == "CACHE_FULL"
        assert caught.value.retry_after_seconds > 0

    asyncio.run(verify_twice())


@given(prompts, max_token_counts, st.integers(1, 9))
def test_a_draft_that_is_always_right_is_always_accepted(prompt: list[int], max_tokens: int, k: int) -> None:
    session = make_session(prompt, max_tokens)
    rounds, statistics = run(session, k, FakeDraft(next_token, []), FakeTarget([]))
    assert statistics.recovered_tokens == 0
    if session.finish_reason is FinishReason.LENGTH:
        assert statistics.accepted_tokens == statistics.proposed_tokens
        assert len(rounds) == 1 + -(-(max_tokens - 1) // (k + 1))


def test_a_target_that_is_lost_in_the_same_round_again_and_again_fails_the_session() -> None:
    """A request that kills the target each time must not end the caches of the others for ever."""
    losses = verifier_module._MOST_LOSSES
    target = FakeTarget(["ok", *["lost"] * losses])
    with pytest.raises(UnavailableError, match=f"{losses} losses"):
        run(make_session([1, 2], 30), 0, FakeDraft(next_token, []), target)
    assert target.num_open == 0


def test_losses_in_different_rounds_do_not_fail_a_session() -> None:
    session = make_session([1, 2], 30, end_token=None)
    _, statistics = run(session, 0, FakeDraft(next_token, []), FakeTarget(["lost", "lost", "ok"] * 30))
    assert session.token_ids[2:] == decode_with_target_alone([1, 2], 30, end_token=None)
    assert statistics.target_replays == 60


@given(prompts, max_token_counts, st.integers(1, 9))
def test_a_draft_that_is_always_wrong_costs_no_token(prompt: list[int], max_tokens: int, k: int) -> None:
    wrong = FakeDraft(lambda token_ids: (next_token(token_ids) + 1) % VOCABULARY_SIZE, [])
    rounds, statistics = run(make_session(prompt, max_tokens), k, wrong, FakeTarget([]))
    assert statistics.accepted_tokens == 0
    assert all(len(round_.commit.token_ids) == 1 for round_ in rounds)


@given(prompts, max_token_counts, draft_lengths, draft_choices(), st.integers(0, 20))
def test_a_target_that_stays_away_ends_the_session_and_loses_nothing_before(
    prompt: list[int], max_tokens: int, k: int, choose: Callable[[list[int]], int], good_rounds: int
) -> None:
    session = make_session(prompt, max_tokens)
    draft, target = FakeDraft(choose, []), FakeTarget(["ok"] * good_rounds + ["lost"], comes_back=False)
    try:
        run(session, k, draft, target)
    except UnavailableError as error:
        assert error.reason == "TARGET_UNAVAILABLE"
        assert error.retry_after_seconds > 0
    else:
        assert session.finish_reason is not None
    expected = decode_with_target_alone(prompt, max_tokens)
    assert session.token_ids[len(prompt) :] == expected[: session.num_generated]
    assert draft.num_open == target.num_open == 0


def test_a_missing_draft_is_counted_with_its_reason() -> None:
    session = make_session([1, 2], 8, end_token=None)
    rounds, statistics = run(session, 4, FakeDraft(next_token, [], model=None), FakeTarget([]))
    # Neither the first round nor the last, which has room for one token only, would have had a proposal.
    assert statistics.rounds_without_draft == len(rounds) - 2
    assert statistics.draft_fault == "DRAFT_UNAVAILABLE"


def test_a_session_that_outgrows_the_draft_goes_on_without_it() -> None:
    session = make_session([1] * (CONTEXT_LENGTH - 4), 40, end_token=None)
    _, statistics = run(session, 3, FakeDraft(next_token, []), FakeTarget([]))
    assert statistics.generated_tokens == 40
    assert statistics.accepted_tokens > 0
    assert statistics.draft_fault == "DRAFT_CONTEXT_EXCEEDED"


def test_a_target_that_was_refused_gets_no_session() -> None:
    target = FakeTarget([], comes_back=False)
    target.model, target.fault, target.refusal = None, "TARGET_REFUSED", "it serves another model"
    with pytest.raises(UnavailableError, match="TARGET_REFUSED"):
        run(make_session([1, 2], 8), 2, FakeDraft(next_token, []), target)
    assert target.num_open == 0


def test_a_target_only_session_leaves_the_draft_alone() -> None:
    opened: list[str] = []
    draft = FakeDraft(next_token, [])
    draft.open_stream = lambda *setup: opened.append(setup)  # type: ignore[assignment,method-assign,arg-type]
    run(make_session([1, 2], 8), 0, draft, FakeTarget([]))
    assert opened == []


@pytest.mark.parametrize(("num_accepted", "next_token_id"), [(9, 1), (0, VOCABULARY_SIZE)])
def test_a_target_that_answers_nonsense_ends_the_session(num_accepted: int, next_token_id: int) -> None:
    class NonsenseStream(FakeTargetStream):
        async def verify(self, *request: object) -> Verdict:
            return Verdict(num_accepted, next_token_id, 2)

    target = FakeTarget([])
    target.open_stream = lambda setup: NonsenseStream(target)  # type: ignore[method-assign]
    with pytest.raises(WorkerError) as error:
        run(make_session([1, 2], 8), 2, FakeDraft(next_token, []), target)
    assert error.value.reason == "TARGET_BROKEN"


@pytest.mark.parametrize("event", ["short", "foreign", "unsure", "few"])
def test_a_draft_that_answers_nonsense_gives_no_proposal(event: str) -> None:
    session = make_session([1, 2], 12, end_token=None)
    rounds, statistics = run(session, 3, FakeDraft(next_token, ["ok", event]), FakeTarget([]))
    assert rounds[1].proposal == drafted((), fault="DRAFT_BROKEN")
    assert statistics.rounds_without_draft == 1


async def test_a_request_to_the_draft_and_its_answer_together_take_no_longer_than_the_timeout() -> None:
    now = 0.0
    waits: list[float] = []

    class Slow(FakeDraftStream):
        async def ask(self, position: int, token_ids: Sequence[int], plan: Plan, timeout_seconds: float) -> None:
            nonlocal now
            waits.append(timeout_seconds)
            now += 0.75

        async def answer(self, timeout_seconds: float) -> Part:
            waits.append(timeout_seconds)
            raise WorkerLateError("DRAFT_LATE", "late")

    class SlowDraft(FakeDraft):
        def open_stream(self, setup: SessionSetup) -> FakeDraftStream:
            return Slow(self)

    setup = SessionSetup("session", Sampling(), namespace=b"")
    drafts = Drafts[DraftStream](Workers([SlowDraft(next_token, [])]))
    drafter = Drafter(lambda: drafts, setup, timeout_seconds=1.0, clock=lambda: now)
    assert await drafter.propose([1, 2, 3], [], plan_of(2)) == Part(TokenSource.DRAFT, fault="DRAFT_LATE")
    assert waits == [1.0, 0.25]

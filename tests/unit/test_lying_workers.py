"""Workers that lie: a draft costs proposals, a target its session, and no token that was not the target's comes out."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core import Part, Plan, Proposal, SessionSetup, Verdict
from coordinator.workers import verifier as verifier_module
from coordinator.workers.answers import check_proposal, check_verdict, is_distribution
from coordinator.workers.errors import WorkerError, WorkerLostError
from coordinator.workers.remote_worker import WorkerLife
from specd.errors import UnavailableError
from specd.sampling import Acceptance, Margin, Sampling, TokenDistribution, TokenLogProbabilities, certain
from specd.vocabulary import TokenSource
from tests.unit.fake_workers import (
    VOCABULARY_SIZE,
    FakeDraft,
    FakeDraftStream,
    FakeTarget,
    FakeTargetStream,
    decode_with_target_alone,
    make_session,
    next_token,
    plan_of,
    run,
)


@pytest.fixture(autouse=True)
def no_pause_between_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier_module, "_FIRST_PAUSE_SECONDS", 0.0)


uint32 = st.integers(0, 9) | st.sampled_from([63, 64, 2**31, 2**32 - 1])
floats = st.floats(width=32, allow_nan=True) | st.sampled_from([0.5, 1.0, float("nan"), -0.0])
prompts = st.lists(st.integers(0, VOCABULARY_SIZE - 1), min_size=1, max_size=6)

Change = Callable[[Part], Part]
changes: st.SearchStrategy[Change] = st.one_of(
    st.just(lambda proposal: proposal),
    st.lists(uint32, max_size=12).map(lambda ids: lambda proposal: replace(proposal, token_ids=ids)),
    uint32.map(lambda id_: lambda proposal: replace(proposal, token_ids=[*proposal.token_ids[1:], id_])),
    st.just(lambda proposal: replace(proposal, token_ids=proposal.token_ids * 300)),
    st.integers(-3, 3).map(lambda by: lambda p: replace(p, cached_len=max(p.cached_len + by, 0))),
    uint32.map(lambda n: lambda proposal: replace(proposal, cached_len=n)),
    uint32.map(lambda n: lambda proposal: replace(proposal, reused_len=n)),
    st.lists(floats, max_size=6).map(lambda values: lambda proposal: replace(proposal, confidences=values)),
)


class LyingDraft(FakeDraft):
    """Changes each proposal in the next of these ways."""

    def __init__(self, changes: Sequence[Change]) -> None:
        super().__init__(next_token, [])
        self.lies = list(changes)

    def open_stream(self, setup: SessionSetup) -> FakeDraftStream:
        self.num_open += 1
        return LyingDraftStream(self)


class LyingDraftStream(FakeDraftStream):
    async def ask(self, position: int, token_ids: Sequence[int], plan: Plan, timeout_seconds: float) -> None:
        if position > len(self.cache.token_ids):
            raise WorkerLostError("CACHE_TOO_SHORT", "it said that it holds more")
        await super().ask(position, token_ids, plan, timeout_seconds)

    async def answer(self, timeout_seconds: float) -> Part:
        assert isinstance(self.worker, LyingDraft)
        change = self.worker.lies.pop(0) if self.worker.lies else lambda proposal: proposal
        return change(await super().answer(timeout_seconds))


class StrictTarget(FakeTarget):
    """Refuses what a target worker refuses, which ends a session."""

    def open_stream(self, setup: SessionSetup) -> FakeTargetStream:
        self.num_open += 1
        return StrictTargetStream(self)


class StrictTargetStream(FakeTargetStream):
    async def verify(
        self, position: int, token_ids: Sequence[int], proposal: Proposal, ahead: Plan, timeout_seconds: float
    ) -> Verdict:
        assert all(token_id < VOCABULARY_SIZE for token_id in proposal.token_ids)
        assert len(proposal.token_ids) <= 9
        return await super().verify(position, token_ids, proposal, ahead, timeout_seconds)


@given(prompts, st.integers(1, 40), st.integers(1, 9), st.lists(changes, max_size=20))
def test_a_lying_draft_changes_no_token(prompt: list[int], max_tokens: int, k: int, lies: list[Change]) -> None:
    session = make_session(prompt, max_tokens)
    draft, target = LyingDraft(lies), StrictTarget([])
    _, statistics = run(session, k, draft, target)
    assert session.token_ids[len(prompt) :] == decode_with_target_alone(prompt, max_tokens)
    assert statistics.draft_reused_tokens <= len(session.token_ids)
    assert draft.num_open == target.num_open == 0


class LyingTarget(FakeTarget):
    """Answers truly for some rounds, then with this."""

    def __init__(self, num_true: int, lie: Callable[[Verdict], Verdict]) -> None:
        super().__init__([])
        self.num_true = num_true
        self.lie = lie

    def open_stream(self, setup: SessionSetup) -> FakeTargetStream:
        self.num_open += 1
        return LyingTargetStream(self)


class LyingTargetStream(FakeTargetStream):
    async def verify(
        self, position: int, token_ids: Sequence[int], proposal: Proposal, ahead: Plan, timeout_seconds: float
    ) -> Verdict:
        verdict = await super().verify(position, token_ids, proposal, ahead, timeout_seconds)
        assert isinstance(self.worker, LyingTarget)
        self.worker.num_true -= 1
        return verdict if self.worker.num_true >= 0 else self.worker.lie(verdict)


LIES: dict[str, Callable[[Verdict], Verdict]] = {
    "more tokens than there are": lambda v: replace(v, num_accepted=1000),
    "a token of no vocabulary": lambda v: replace(v, next_token_id=2**32 - 1),
    "a cache of another length": lambda v: replace(v, cached_len=v.cached_len + 1),
    "an empty cache": lambda v: replace(v, cached_len=0),
    "a cache of 2^32": lambda v: replace(v, cached_len=2**32 - 1),
    "a margin that is not a number": lambda v: replace(v, margins=[Margin(math.nan)] * (v.num_accepted + 1)),
    "a negative margin": lambda v: replace(v, margins=[Margin(-0.1)] * (v.num_accepted + 1)),
    "a near tie without a rival": lambda v: replace(v, margins=[Margin(math.inf, True)] * (v.num_accepted + 1)),
    "more margins than tokens": lambda v: replace(v, margins=[Margin(1.0)] * (v.num_accepted + 2)),
    "margins of proposed tokens only": lambda v: replace(v, margins=[Margin(1.0)] * max(v.num_accepted, 2)),
    "more reused than there was": lambda v: replace(v, reused_len=2**32 - 1),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("num_true", [0, 1, 4])
def test_a_target_that_lies_ends_its_session_with_the_tokens_before(lie: str, num_true: int) -> None:
    session = make_session([1, 2], 30, end_token=None)
    target = LyingTarget(num_true, LIES[lie])
    with pytest.raises(WorkerError) as error:
        run(session, 3, FakeDraft(next_token, []), target)
    assert error.value.reason == "TARGET_BROKEN"
    assert session.token_ids[2:] == decode_with_target_alone([1, 2], 30, end_token=None)[: session.num_generated]
    assert target.num_open == 0


def test_a_token_that_is_rejected_and_chosen_at_once_is_a_lie() -> None:
    session = make_session([1, 2], 30, end_token=None)

    def reject_all(verdict: Verdict) -> Verdict:
        return replace(verdict, num_accepted=0, next_token_id=next_token(session.token_ids))

    with pytest.raises(WorkerError, match="rejected a token and chose the same"):
        run(session, 3, FakeDraft(next_token, []), LyingTarget(1, reject_all))


@pytest.mark.parametrize(
    ("values", "is_first"),
    [
        ([-1.0], True),
        ([-1.0, -2.0, -3.0], True),
        ([-1.0, float("nan")], True),
        ([-1.0, 0.5], True),
        ([-1.0, -2.0], False),
    ],
)
def test_a_target_sends_the_log_probabilities_of_the_prompt_that_were_asked_for(
    values: list[float], is_first: bool
) -> None:
    setup = SessionSetup("", Sampling(top_log_probabilities=0, prompt_log_probabilities=True), namespace=b"")
    sizes = {"session_len": 3, "vocabulary_size": 9}
    own = [TokenLogProbabilities(-1.0)]
    lie = Verdict(0, 5, 3, 0, own, prompt_log_probabilities=[*map(TokenLogProbabilities, values)])
    with pytest.raises(WorkerError, match="log-probabilities"):
        check_verdict(lie, [], setup, is_first=is_first, **sizes)
    truth = [TokenLogProbabilities(-1.0), TokenLogProbabilities(0.0)] if is_first else []
    check_verdict(replace(lie, prompt_log_probabilities=truth), [], setup, is_first=is_first, **sizes)


@given(
    prompts,
    st.integers(0, 4),
    st.builds(
        lambda a, n, c, r: lambda v: Verdict(a, n, v.cached_len + c, r),
        uint32,
        uint32,
        st.integers(-1, 1) | st.just(0),
        uint32,
    ),
)
def test_whatever_a_target_says_the_tokens_are_of_the_vocabulary(
    prompt: list[int], num_true: int, lie: Callable[[Verdict], Verdict]
) -> None:
    """A possible lie cannot be recognised, and changes only its own session."""
    session = make_session(prompt, 30)
    try:
        _, statistics = run(session, 4, FakeDraft(next_token, []), LyingTarget(num_true, lie))
    except WorkerError as error:
        assert error.reason == "TARGET_BROKEN"
    else:
        assert statistics.generated_tokens == session.num_generated
        assert statistics.target_reused_tokens <= len(session.token_ids)
    assert all(token_id < VOCABULARY_SIZE for token_id in session.token_ids)
    assert session.num_generated <= 30


def packed(kind: str, values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}{kind}", *values)


@given(st.lists(floats, max_size=6), st.none() | st.lists(uint32, max_size=6), st.integers(0, 7), st.integers(0, 3))
def test_only_distributions_pass_for_one(
    probabilities: list[float], token_ids: list[int] | None, token_id: int, cut: int
) -> None:
    ids = packed("I", token_ids) if token_ids else b""
    values = packed("f", probabilities)
    given_ = TokenDistribution(ids, values[: len(values) - cut])
    if is_distribution(given_, token_id, 5):
        entries = dict(zip(token_ids or range(5), probabilities, strict=False))
        assert cut == 0
        assert len(entries) == len(probabilities)
        assert set(entries) <= set(range(5))
        assert sum(entries.values()) == pytest.approx(1, abs=2e-3)
        assert entries[token_id] > 0


def test_true_distributions_pass() -> None:
    assert is_distribution(certain(3), 3, 5)
    assert not is_distribution(certain(3), 2, 5)
    third = packed("f", [1 / 3] * 3)
    assert is_distribution(TokenDistribution(b"", third), 2, 5)
    assert is_distribution(TokenDistribution(packed("I", [0, 2, 4]), third), 4, 5)
    assert not is_distribution(TokenDistribution(packed("I", [0, 2, 2]), third), 2, 5)
    assert not is_distribution(TokenDistribution(b"", packed("f", [0.5, 0.4])), 0, 5)


@pytest.mark.parametrize("distribution", [TokenDistribution(b"", packed("f", [float("nan")] * 5)), certain(1)])
def test_a_proposal_from_no_distribution_does_not_reach_the_target(distribution: TokenDistribution) -> None:
    """The target would refuse the round, and the session would end for a draft's fault."""
    setup = SessionSetup("s", Sampling(temperature=1.0, acceptance=Acceptance.REJECTION), namespace=b"")
    part = Part(TokenSource.DRAFT, [2], [distribution], cached_len=4)
    with pytest.raises(WorkerError) as error:
        check_proposal(part, plan_of(1), setup, session_len=4, vocabulary_size=5)
    assert error.value.reason == "DRAFT_BROKEN"


class ReplacedTarget(FakeTarget):
    """One that is there again in a later life when it was lost."""

    def __init__(self, outcomes: list[str], earlier: WorkerLife, later: WorkerLife) -> None:
        super().__init__(outcomes)
        self.life, self._later = earlier, later

    async def comes_back_in_time(self) -> bool:
        self.life = self._later
        return True


def test_a_session_begins_with_any_weights_until_it_has_tokens() -> None:
    target = ReplacedTarget(["lost"], WorkerLife("a", ""), WorkerLife("b", "w"))
    session = make_session([1, 2], 12, end_token=None)
    run(session, 0, FakeDraft(next_token, []), target)
    assert session.token_ids[2:] == decode_with_target_alone([1, 2], 12, end_token=None)


@pytest.mark.parametrize(
    ("earlier", "later", "goes_on"),
    [
        (WorkerLife("a", "w"), WorkerLife("b", "w"), True),
        (WorkerLife("a", "w"), WorkerLife("b", "x"), False),
        (WorkerLife("a", "w"), WorkerLife("b", ""), False),
        (WorkerLife("a", ""), WorkerLife("b", ""), False),
        (WorkerLife("a", ""), WorkerLife("b", "w"), False),
        (WorkerLife("a", ""), WorkerLife("a", "w"), True),
    ],
)
def test_a_session_goes_on_only_with_the_same_weights(earlier: WorkerLife, later: WorkerLife, goes_on: bool) -> None:
    target = ReplacedTarget(["ok", "ok", "lost"], earlier, later)
    session = make_session([1, 2], 12, end_token=None)
    if goes_on:
        run(session, 0, FakeDraft(next_token, []), target)
        assert session.num_generated == 12
    else:
        with pytest.raises(UnavailableError) as error:
            run(session, 0, FakeDraft(next_token, []), target)
        assert error.value.reason == "TARGET_REPLACED"
        assert session.num_generated == 2
    assert session.token_ids[2:] == decode_with_target_alone([1, 2], 12, end_token=None)[: session.num_generated]
    assert target.num_open == 0

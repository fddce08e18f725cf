"""The round loop against fake workers: whatever draft and faults do, the target's own tokens come out."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import verifier as verifier_module
from coordinator.decoding import decode
from coordinator.drafter import Drafter
from coordinator.plan import Plan
from coordinator.round import Proposal, Round, Verdict
from coordinator.session import FinishReason, Session
from coordinator.statistics import SessionStatistics
from coordinator.verifier import Verifier
from coordinator.worker_stream import WorkerError, WorkerFullError, WorkerLateError, WorkerLostError
from specd.errors import ResourceExhaustedError, UnavailableError
from specd.model_info import ModelInfo
from specd.sampling import Sampling
from specd.step_costs import StepCosts

VOCABULARY_SIZE = 5
CONTEXT_LENGTH = 64
END_TOKEN = 0
MODEL = ModelInfo("fake", "fake", "", "", VOCABULARY_SIZE, CONTEXT_LENGTH, (), "", "")


def next_token(token_ids: Sequence[int]) -> int:
    """Return the fake target's choice, which depends on every token before it."""
    state = 7
    for token_id in token_ids:
        state = (state * 31 + token_id + 1) % 1_000_003
    return state % VOCABULARY_SIZE


def decode_with_target_alone(prompt: list[int], max_tokens: int, end_token: int | None = END_TOKEN) -> list[int]:
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + max_tokens:
        token_ids.append(next_token(token_ids))
        if token_ids[-1] == end_token:
            break
    return token_ids[len(prompt) :]


class FakeCache:
    """A worker's cache that holds the protocol to its word."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def hold(self, position: int, token_ids: Sequence[int]) -> list[int]:
        assert len(token_ids) >= 1
        assert position <= len(self.token_ids), "the coordinator counted on tokens that the worker does not hold"
        self.token_ids = [*self.token_ids[:position], *token_ids]
        return self.token_ids


@dataclass
class FakeTarget:
    """The target worker and the way to it. Each verify takes the next of `events`; after the last all goes well."""

    events: list[str]
    comes_back: bool = True
    num_open: int = 0
    model: ModelInfo | None = MODEL
    step_costs: StepCosts | None = None
    fault: str = "TARGET_UNAVAILABLE"
    refusal: str = ""

    def open_stream(self, session_id: str, sampling: Sampling) -> FakeTargetStream:
        self.num_open += 1
        return FakeTargetStream(self)

    async def wait_until_ready(self, timeout_seconds: float) -> bool:
        return self.comes_back


@dataclass
class FakeTargetStream:
    worker: FakeTarget
    cache: FakeCache = field(default_factory=FakeCache)
    broken: bool = False

    async def verify(
        self, position: int, token_ids: Sequence[int], proposal: Proposal, timeout_seconds: float
    ) -> Verdict:
        assert not self.broken, "a stream that broke was used again"
        event = self.worker.events.pop(0) if self.worker.events else "ok"
        if event == "lost":
            self.broken = True
            raise WorkerLostError("TARGET_UNAVAILABLE", "gone")
        if event == "full":
            self.broken = True
            raise WorkerFullError("CACHE_FULL", "no room")
        proposed = proposal.token_ids
        held = self.cache.hold(position, [*token_ids, *proposed])
        if event == "late":
            raise WorkerLateError("TARGET_LATE", "late")
        committed = len(held) - len(proposed)
        own = [next_token(held[: committed + i]) for i in range(len(proposed) + 1)]
        num_accepted = next((i for i, token in enumerate(proposed) if token != own[i]), len(proposed))
        return Verdict(num_accepted, own[num_accepted], len(held))

    def close(self) -> None:
        self.worker.num_open -= 1


@dataclass
class FakeDraft:
    """The draft worker: `choose` makes its proposals, `events` its failures."""

    choose: Callable[[list[int]], int]
    events: list[str]
    model: ModelInfo | None = MODEL
    step_costs: StepCosts | None = None
    fault: str = "DRAFT_UNAVAILABLE"
    num_open: int = 0

    def open_stream(self, session_id: str, sampling: Sampling) -> FakeDraftStream:
        self.num_open += 1
        return FakeDraftStream(self)


@dataclass
class FakeDraftStream:
    worker: FakeDraft
    cache: FakeCache = field(default_factory=FakeCache)
    answer: tuple[list[int], int] = ([], 0)
    event: str = "ok"
    broken: bool = False
    uses_when_broken: int = 0

    ahead: tuple[Proposal, Proposal] | None = None

    async def send(self, position: int, token_ids: Sequence[int], plan: Plan, timeout_seconds: float) -> None:
        self.ahead = None
        if self.broken:
            self.uses_when_broken += 1
            assert self.uses_when_broken == 1, "after a prefill whose error nobody saw, one use may find it broken"
            raise WorkerLostError("DRAFT_UNAVAILABLE", "gone")
        self.event = self.worker.events.pop(0) if self.worker.events else "ok"
        self.broken = self.event in {"lost", "full", "refuses"}
        if self.event == "lost":
            raise WorkerLostError("DRAFT_UNAVAILABLE", "gone")
        held = self.cache.hold(position, token_ids)
        proposal: list[int] = []
        # An early end: the plan's thresholds stand for how many tokens there are.
        length = min(plan.num_draft_tokens, len(plan.min_confidences) or plan.num_draft_tokens)
        while len(proposal) < length:
            proposal.append(self.worker.choose([*held, *proposal]))
        held.extend(proposal[:-1])
        if not proposal:
            del held[-1:]  # a prefill leaves the last tokens to the next request
        self.answer = proposal, len(held)
        if proposal and plan.num_ahead_tokens and self.event in {"ok", "interrupted", "foreign"}:
            self._go_ahead(held, proposal, plan.num_ahead_tokens)

    def _go_ahead(self, held: list[int], proposal: list[int], num_tokens: int) -> None:
        ahead: list[int] = []
        for _ in range(1 + num_tokens):
            held.append(ahead[-1] if ahead else proposal[-1])
            ahead.append(self.worker.choose(held))
        if self.event != "interrupted":  # then nobody hears of what the cache holds
            if self.event == "foreign":
                ahead = [VOCABULARY_SIZE] * len(ahead)
            self.ahead = Proposal(proposal, cached_len=self.answer[1]), Proposal(ahead, cached_len=len(held))

    async def receive(self, timeout_seconds: float) -> Proposal:
        token_ids, cached_len = self.answer
        match self.event:
            case "late":
                raise WorkerLateError("DRAFT_LATE", "late")
            case "full":
                raise WorkerFullError("CACHE_FULL", "no room")
            case "refuses":
                raise WorkerError("DRAFT_INTERNAL", "no")
            case "short":
                token_ids = token_ids[1:]
            case "foreign":
                token_ids = [VOCABULARY_SIZE] * len(token_ids)
        confidences = {"unsure": [float("nan")] * len(token_ids), "few": [0.5] * (len(token_ids) + 1)}
        return Proposal(token_ids, cached_len=cached_len, confidences=confidences.get(self.event, []))

    def take_ahead(self) -> tuple[Proposal, Proposal] | None:
        ahead, self.ahead = self.ahead, None
        return ahead

    def close(self) -> None:
        self.worker.num_open -= 1


class Planned:
    """Speculation with plans that are made in advance, and repeated."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._plans = itertools.cycle(plans)
        self.will_draft = any(plan.num_draft_tokens for plan in plans)

    def plan(self) -> Plan:
        return next(self._plans)

    def observe(self, plan: Plan, round_: Round) -> Round:
        assert round_.num_proposed <= plan.num_draft_tokens
        return round_


def make_session(prompt: list[int], max_tokens: int) -> Session:
    return Session("s", list(prompt), max_tokens, frozenset({END_TOKEN}))


def run(
    session: Session, plans: int | Sequence[Plan], draft: FakeDraft, target: FakeTarget
) -> tuple[list[Round], SessionStatistics]:
    """Decode a session to its end; time passes by a second at each look at the clock, so that back-offs end."""
    clock = itertools.count().__next__
    drafter = Drafter(draft, "s", Sampling(), timeout_seconds=1.0, clock=clock)
    verifier = Verifier(target, "s", Sampling(), timeout_seconds=1.0, recovery_seconds=1e9, clock=clock)
    speculation = Planned([Plan(plans)] if isinstance(plans, int) else plans)
    statistics = SessionStatistics(prompt_tokens=session.prompt_len)
    rounds: list[Round] = []

    async def drive() -> None:
        try:
            async for round_ in decode(session, speculation, drafter, verifier, clock=clock):
                assert round_.commit.finish_reason is session.finish_reason
                rounds.append(round_)
                statistics.add(round_, arrived_at=0.0)
        finally:
            drafter.close()
            verifier.close()

    asyncio.run(drive())
    return rounds, statistics


@pytest.fixture(autouse=True)
def no_pause_between_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier_module, "_RETRY_SECONDS", 0.0)


tokens = st.integers(0, VOCABULARY_SIZE - 1)
prompts = st.lists(tokens, min_size=1, max_size=8)
max_token_counts = st.integers(1, 40)
draft_lengths = st.integers(0, 9)
target_events = st.lists(st.sampled_from(["ok", "ok", "lost", "late", "full"]), max_size=30)
draft_events = st.lists(
    st.sampled_from(
        ["ok", "ok", "lost", "late", "full", "refuses", "short", "foreign", "interrupted", "unsure", "few"]
    ),
    max_size=30,
)
plans = st.lists(
    st.builds(
        Plan, draft_lengths, st.integers(0, 9).map(lambda count: (0.5,) * count), num_ahead_tokens=st.integers(0, 9)
    ),
    min_size=1,
    max_size=8,
)


@st.composite
def draft_choices(draw: st.DrawFn) -> Callable[[list[int]], int]:
    """A draft that is right at some positions and says anything at others, from always right to always wrong."""
    offsets = draw(st.lists(st.integers(0, VOCABULARY_SIZE - 1), min_size=1, max_size=12))
    return lambda token_ids: (next_token(token_ids) + offsets[len(token_ids) % len(offsets)]) % VOCABULARY_SIZE


@settings(max_examples=1000)  # few of them go ahead and then end a proposal earlier
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
        FakeTarget(["full", "full", "ok", *["full"] * 100]),
        "s",
        Sampling(),
        timeout_seconds=1.0,
        recovery_seconds=10.0,
        clock=itertools.count().__next__,
    )

    async def verify_twice() -> None:
        assert (await verifier.verify(session.token_ids, Proposal([]))).next_token_id == next_token([1, 2, 3])
        assert verifier.num_replays == 0
        with pytest.raises(ResourceExhaustedError) as caught:
            await verifier.verify(session.token_ids, Proposal([]))
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


@given(prompts, max_token_counts, st.integers(1, 9))
def test_what_a_draft_that_is_always_right_went_ahead_by_is_never_asked_for(
    prompt: list[int], max_tokens: int, k: int
) -> None:
    session = make_session(prompt, max_tokens)
    session.eos_token_ids = frozenset()
    rounds, statistics = run(session, [Plan(k, num_ahead_tokens=k)], FakeDraft(next_token, []), FakeTarget([]))
    assert statistics.accepted_tokens == statistics.proposed_tokens
    drafted = [round_ for round_ in rounds if round_.num_proposed]
    # All but the first, and any for which there was no room to go ahead before.
    assert statistics.rounds_ahead >= len(drafted) - 2
    assert len(rounds) <= 2 + -(-(max_tokens - 1) // (k + 1))


def test_a_draft_that_is_lost_after_going_ahead_still_gives_what_it_said() -> None:
    session = make_session([1, 2], 30)
    session.eos_token_ids = frozenset()
    draft = FakeDraft(next_token, ["ok", "ok", "lost"])
    rounds, _ = run(session, [Plan(3, num_ahead_tokens=3)], draft, FakeTarget([]))
    # The prompt, the first proposal, and the one that the draft had made already when it was lost.
    assert [round_.proposal.was_ahead for round_ in rounds[:3]] == [False, False, True]
    assert not rounds[2].proposal.fault
    assert rounds[2].commit.num_accepted == 3
    assert session.token_ids[2:] == decode_with_target_alone([1, 2], 30, end_token=None)


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
    session = make_session([1, 2], 8)
    session.eos_token_ids = frozenset()
    rounds, statistics = run(session, 4, FakeDraft(next_token, [], model=None), FakeTarget([]))
    # Neither the first round nor the last, which has room for one token only, would have had a proposal.
    assert statistics.rounds_without_draft == len(rounds) - 2
    assert statistics.draft_fault == "DRAFT_UNAVAILABLE"


def test_a_session_that_outgrows_the_draft_goes_on_without_it() -> None:
    session = make_session([1] * (CONTEXT_LENGTH - 4), 40)
    session.eos_token_ids = frozenset()
    _, statistics = run(session, 3, FakeDraft(next_token, []), FakeTarget([]))
    assert statistics.generated_tokens == 40
    assert statistics.accepted_tokens > 0
    assert statistics.draft_fault == "DRAFT_CONTEXT_EXCEEDED"


def test_a_target_that_was_refused_gets_no_session() -> None:
    target = FakeTarget([], comes_back=False, model=None, fault="TARGET_REFUSED", refusal="it serves another model")
    with pytest.raises(UnavailableError, match="it serves another model"):
        run(make_session([1, 2], 8), 2, FakeDraft(next_token, []), target)
    assert target.num_open == 0


def test_a_target_only_session_leaves_the_draft_alone() -> None:
    opened: list[str] = []
    draft = FakeDraft(next_token, [])
    draft.open_stream = lambda *session: opened.append(session)  # type: ignore[assignment,method-assign]
    run(make_session([1, 2], 8), 0, draft, FakeTarget([]))
    assert opened == []


@pytest.mark.parametrize(("num_accepted", "next_token_id"), [(9, 1), (0, VOCABULARY_SIZE)])
def test_a_target_that_answers_nonsense_ends_the_session(num_accepted: int, next_token_id: int) -> None:
    class NonsenseStream(FakeTargetStream):
        async def verify(self, *request: object) -> Verdict:
            return Verdict(num_accepted, next_token_id, 2)

    target = FakeTarget([])
    target.open_stream = lambda session_id, sampling: NonsenseStream(target)  # type: ignore[method-assign]
    with pytest.raises(WorkerError) as error:
        run(make_session([1, 2], 8), 2, FakeDraft(next_token, []), target)
    assert error.value.reason == "TARGET_BROKEN"


@pytest.mark.parametrize("event", ["short", "foreign", "unsure", "few"])
def test_a_draft_that_answers_nonsense_gives_no_proposal(event: str) -> None:
    session = make_session([1, 2], 12)
    session.eos_token_ids = frozenset()
    rounds, statistics = run(session, 3, FakeDraft(next_token, ["ok", event]), FakeTarget([]))
    assert rounds[1].proposal == Proposal([], fault="DRAFT_BROKEN")
    assert statistics.rounds_without_draft == 1

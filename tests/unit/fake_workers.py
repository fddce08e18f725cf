"""A draft and a target that choose tokens by a formula and fail when a test says so, and the round loop on them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.core import Match, Part, Plan, Proposal, Round, Session, SessionSetup, Verdict
from coordinator.proposals.drafter import Drafter, DraftStream
from coordinator.proposals.drafts import Drafts
from coordinator.proposals.proposer import Proposer
from coordinator.proposals.source import Source
from coordinator.round_loop import RoundPlanner, decode
from coordinator.telemetry.statistics import SessionStatistics
from coordinator.workers.errors import WorkerError, WorkerFullError, WorkerLateError, WorkerLostError
from coordinator.workers.remote_worker import RemoteWorker, TargetDraft, WorkerLife
from coordinator.workers.verifier import Verifier
from coordinator.workers.workers import Workers
from specd.model_info import ModelInfo
from specd.sampling import Sampling
from specd.vocabulary import PROPOSERS, TokenSource

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


class FakeTarget(RemoteWorker["FakeTargetStream"]):
    """The target worker. Each verify takes the next of `events`; after the last all goes well."""

    def __init__(
        self,
        events: list[str],
        *,
        comes_back: bool = True,
        choose: Callable[[Sequence[int]], int] = next_token,
        propose: Callable[[list[int]], int] | None = None,
    ) -> None:
        """With `propose`, it drafts itself; a proposal takes the next event, too."""
        super().__init__("TARGET_UNAVAILABLE", MODEL)
        self.propose = propose
        self.self_draft = TargetDraft(MODEL, None) if propose is not None else None
        self.events = events
        self.comes_back = comes_back
        self.choose = choose
        self.num_open = 0

    def open_stream(self, setup: SessionSetup) -> FakeTargetStream:
        self.num_open += 1
        return FakeTargetStream(self)

    async def comes_back_in_time(self) -> bool:
        return self.comes_back


@dataclass
class OnlyRoute:
    """The way to the only target."""

    worker: FakeTarget

    def can_leave(self, life: WorkerLife | None) -> bool:
        return False

    async def leave(self, life: WorkerLife | None, timeout_seconds: float) -> bool:
        raise AssertionError("there is no other target")

    def began(self, verdict: Verdict) -> None:
        """Note nothing."""

    async def wait_until_ready(self, life: WorkerLife | None, timeout_seconds: float) -> bool:
        return await self.worker.comes_back_in_time()


@dataclass
class FakeTargetStream:
    worker: FakeTarget
    cache: FakeCache = field(default_factory=FakeCache)
    broken: bool = False
    own: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.drafts = self.worker.self_draft is not None

    async def verify(
        self, position: int, token_ids: Sequence[int], proposal: Proposal, ahead: Plan, timeout_seconds: float
    ) -> Verdict:
        assert not self.broken, "a stream that broke was used again"
        kept = [part for part in proposal.parts if part.from_target and part.token_ids]
        assert self.drafts or not kept, "a target without a draft has kept no distributions"
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
        own = [self.worker.choose(held[: committed + i]) for i in range(len(proposed) + 1)]
        num_accepted = next((i for i, token in enumerate(proposed) if token != own[i]), len(proposed))
        self.own = []
        assert self.drafts or not ahead.limit(TokenSource.DRAFT), "a target without a draft was asked for tokens"
        if self.worker.propose is not None:
            tokens = [*held[: committed + num_accepted], own[num_accepted]]
            for _ in range(ahead.limit(TokenSource.DRAFT)):
                self.own.append(self.worker.propose([*tokens, *self.own]))
        return Verdict(num_accepted, own[num_accepted], len(held))

    async def proposal(self, timeout_seconds: float) -> Part:
        event = self.worker.events[0] if self.worker.events else "ok"
        if event == "lost":  # the next request meets it, too
            raise WorkerLostError("TARGET_UNAVAILABLE", "gone")
        del self.worker.events[:1]
        if event == "ok":
            return Part(TokenSource.DRAFT, self.own, from_target=True)
        raise WorkerLateError("TARGET_LATE", "late")

    def close(self) -> None:
        self.worker.num_open -= 1


class FakeDraft(RemoteWorker["FakeDraftStream"]):
    """The draft worker: `choose` makes its proposals, `events` its failures."""

    def __init__(
        self, choose: Callable[[list[int]], int], events: list[str], *, model: ModelInfo | None = MODEL
    ) -> None:
        super().__init__("DRAFT_UNAVAILABLE", model)
        self.choose = choose
        self.events = events
        self.num_open = 0

    def open_stream(self, setup: SessionSetup) -> FakeDraftStream:
        self.num_open += 1
        return FakeDraftStream(self)


@dataclass
class FakeDraftStream:
    worker: FakeDraft
    cache: FakeCache = field(default_factory=FakeCache)
    prepared: tuple[list[int], int] = ([], 0)
    event: str = "ok"
    broken: bool = False
    uses_when_broken: int = 0

    async def ask(self, position: int, token_ids: Sequence[int], plan: Plan, timeout_seconds: float) -> None:
        if self.broken:
            self.uses_when_broken += 1
            assert self.uses_when_broken == 1, "after a prefill with an unseen error, only one use may find it broken"
            raise WorkerLostError("DRAFT_UNAVAILABLE", "gone")
        self.event = self.worker.events.pop(0) if self.worker.events else "ok"
        self.broken = self.event in {"lost", "full", "refuses"}
        if self.event == "lost":
            raise WorkerLostError("DRAFT_UNAVAILABLE", "gone")
        held = self.cache.hold(position, token_ids)
        proposal: list[int] = []
        # An early end: the plan's thresholds stand for how many tokens there are.
        limit = plan.limit(TokenSource.DRAFT)
        length = min(limit, len(plan.min_confidences) or limit)
        while len(proposal) < length:
            proposal.append(self.worker.choose([*held, *proposal]))
        held.extend(proposal[:-1])
        if not proposal:
            del held[-1:]  # a prefill leaves the last tokens to the next request
        self.prepared = proposal, len(held)

    async def answer(self, timeout_seconds: float) -> Part:
        token_ids, cached_len = self.prepared
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
        confidence = confidences.get(self.event, [])
        return Part(TokenSource.DRAFT, token_ids, cached_len=cached_len, confidences=confidence)

    def close(self) -> None:
        self.worker.num_open -= 1


def plan_of(k: int, min_confidences: Sequence[float] = (), num_others: int = 0) -> Plan:
    """Return a plan of k tokens of the draft model, and behind them others of each other source."""
    others = [source for source in PROPOSERS if source is not TokenSource.DRAFT]
    return Plan({TokenSource.DRAFT: k, **dict.fromkeys(others, num_others)}, min_confidences)


def drafted(token_ids: Sequence[int], **fields: Any) -> Proposal:
    """Return a proposal of the draft model alone."""
    return Proposal((Part(TokenSource.DRAFT, token_ids, **fields),))


SETUP = SessionSetup("s", Sampling(), namespace=b"")


class Planned:
    """A planner that repeats given plans."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._plans = itertools.cycle(plans)
        self._next_plan = next(self._plans)
        self._will_draft = any(plan.limit(TokenSource.DRAFT) for plan in plans)

    def will_draft(self) -> bool:
        return self._will_draft

    def plan(self, matches: Sequence[Match]) -> Plan:
        plan, self._next_plan = self._next_plan, next(self._plans)
        return plan

    def ahead(self) -> Plan:
        return self._next_plan

    def observe(self, plan: Plan, round_: Round) -> float:
        assert round_.num_proposed <= plan.most
        for part in round_.proposal.parts:
            assert len(part.token_ids) <= plan.limit(part.source)
        return 0.0


def make_session(prompt: list[int], max_tokens: int, end_token: int | None = END_TOKEN) -> Session:
    return Session("s", list(prompt), max_tokens, frozenset() if end_token is None else frozenset({end_token}))


def run(
    session: Session,
    plans: int | Sequence[Plan],
    draft: FakeDraft,
    target: FakeTarget,
    *others: Source,
) -> tuple[list[Round], SessionStatistics]:
    """Decode a session to its end by the draft and other sources, with these plans in turn."""
    clock = itertools.count().__next__
    drafts = Drafts[DraftStream](Workers([draft]))
    drafter = Drafter(lambda: drafts, SETUP, timeout_seconds=1.0, clock=clock)
    planner = Planned([plan_of(plans)] if isinstance(plans, int) else plans)
    return run_planned(session, planner, Proposer([drafter, *others]), target, clock)


def run_planned(
    session: Session,
    planner: RoundPlanner,
    proposer: Proposer,
    target: FakeTarget,
    clock: Callable[[], int] | None = None,
) -> tuple[list[Round], SessionStatistics]:
    """Decode a session to its end; time passes by a second at each look at the clock, so that back-offs end."""
    clock = clock or itertools.count().__next__
    verifier = Verifier(OnlyRoute(target), SETUP, timeout_seconds=1.0, recovery_seconds=1e9, clock=clock)
    statistics = SessionStatistics(prompt_tokens=session.prompt_len)
    rounds: list[Round] = []

    async def drive() -> None:
        try:
            async for round_ in decode(session, planner, proposer, verifier, clock=clock):
                assert round_.commit.finish_reason is session.finish_reason
                rounds.append(round_)
                statistics.add(round_, arrived_at=0.0)
        finally:
            proposer.close()
            verifier.close()

    asyncio.run(drive())
    return rounds, statistics

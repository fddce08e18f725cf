"""Rounds of sessions in a world with known costs and acceptance, for tests of the planner."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from coordinator.core import Commit, Exchange, Match, Part, Plan, Proposal, Round, Verdict
from coordinator.planner.planner import Planner
from coordinator.planner.round_costs import RoundCosts
from coordinator.planner.session_planner import SessionPlanner
from coordinator.sources import Sources
from specd.sampling import Sampling
from specd.step_costs import StepCosts
from specd.vocabulary import TokenSource

ALL_SOURCES = Sources()
SESSIONS, WIDTHS, LENGTHS = (1, 2, 4, 16), (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 33), (1, 2, 4, 8)


@dataclass(frozen=True)
class World:
    """Costs in seconds, and the probability that a token is accepted after those before it, by session.

    Calibration measured `verify(sessions, width)` times `target_bias`, and `draft(sessions, k)` times `draft_bias`.
    A proposal in operation takes `cold_seconds` more. `wire` is the way to the draft and back. `informative` says
    whether confidences tell acceptance.
    """

    acceptance: Callable[[int], float] = lambda _: 0.8
    verify: Callable[[float, float], float] = lambda n, w: 0.020 + 0.0008 * n * w
    draft: Callable[[float, float], float] = lambda n, k: 0.0016 * k
    overhead: float = 0.001
    wire: float = 0.0005
    target_bias: float = 1.0
    draft_bias: float = 1.0
    contention: float = 1.0  # of shared rounds with drafts
    cold_seconds: float = 0.0  # of each proposal in operation, when other work was done before
    informative: bool = True
    # Of the rounds, how many have a match, and the probability that a looked-up token is accepted.
    matches: float = 0.0
    lookup: float = 0.0
    # If matches come in runs: the probability that a match follows a match at the next token. `matches` is then the
    # probability that one follows no match.
    match_follows: float | None = None
    # The target drafts: the proposal that a round asks for takes its time before the next round, used or not.
    asks_ahead: bool = False


@dataclass
class Simulation:
    """Sessions in a world, a clock, and a planner that may be asked; `new_planner` begins what plans for a session."""

    world: World
    seed: int = 0
    now: float = 0.0
    planner: Planner = field(init=False)

    def __post_init__(self) -> None:
        world = self.world
        target = {n: {w: world.target_bias * world.verify(n, w) for w in WIDTHS} for n in SESSIONS}
        draft = {n: {k: world.draft_bias * world.draft(n, k) for k in LENGTHS} for n in SESSIONS}
        self.random = random.Random(self.seed)
        verifies, proposals = StepCosts(target), StepCosts(draft)
        self.planner = Planner(RoundCosts(lambda: verifies, lambda: proposals))
        self._has_match: dict[int, bool] = {}
        self._num_emitted: dict[int, int] = {}  # in the round before
        self._ahead: dict[int, tuple[list[float], int]] = {}  # by session

    def run(self, *, num_sessions: int, at_once: int, tokens: int, sources: Sources = ALL_SOURCES) -> float:
        """Run sessions of so many tokens, so many at once; returns tokens per second. A given k is not planned."""
        self.now, started_at, total = self.now, self.now, 0
        waiting = list(range(num_sessions))
        running: dict[int, tuple[SessionPlanner, int]] = {}
        plans: dict[int, Plan] = {}
        while waiting or running:
            while waiting and len(running) < at_once:
                i = waiting.pop(0)
                session = SessionPlanner(self.planner, Sampling(), sources, client="", asks_ahead=self.world.asks_ahead)
                running[i] = (session, tokens)
            for i in running.keys() - plans.keys():  # their first rounds, which are not simulated, end together
                plans[i] = running[i][0].plan(self._matches(i)).within(tokens)
            rounds = self._round(plans)
            if self.world.asks_ahead:
                asked = {i: session.ahead() for i, (session, _) in running.items()}
                self._ahead = {i: self._propose(self.world.acceptance(i), plan) for i, plan in asked.items()}
            # As in a coordinator, a session plans its next round before another one's last round is observed.
            for i, round_ in rounds.items():
                session, left = running[i]
                session.observe(plans.pop(i), round_)
                emitted = self._num_emitted[i] = len(round_.commit.token_ids)
                total += emitted
                running[i] = (session, left - emitted)
                if left > emitted:
                    plans[i] = session.plan(self._matches(i)).within(left - emitted)
                else:
                    session.close()
                    del running[i]
        return total / (self.now - started_at)

    def _round(self, plans: dict[int, Plan]) -> dict[int, Round]:
        world, n = self.world, len(plans)
        proposals = {i: self._proposal(i, plan) for i, plan in plans.items()}
        tails = {i: self._look_up(plan, *proposals[i]) for i, plan in plans.items()}
        made = self._ahead if world.asks_ahead else proposals
        longest = max((len(confidences) for confidences, _ in made.values()), default=0)
        width = 1 + sum(len(confidences) + tails[i][0] for i, (confidences, _) in proposals.items()) / n
        draft = world.cold_seconds + world.draft(n, longest) if longest else 0.0
        verify = world.verify(n, width)
        slower = world.contention if longest and n > 1 else 1.0
        seconds = world.overhead + slower * (verify + draft) + (world.wire if longest else 0.0)
        started_at, self.now = self.now, self.now + seconds
        rounds = {}
        for i, (sure, num_accepted) in proposals.items():
            k, (looked_up, accepted_of_lookup) = len(sure), tails[i]
            accepted = num_accepted + accepted_of_lookup
            confidences = sure if plans[i].min_confidences else []
            propose = (
                Exchange(0.0, world.cold_seconds + world.draft(n, k), world.wire, num_sessions=n) if k else Exchange()
            )
            exchange = Exchange(0.0, verify, 0.0, num_sessions=n, step_tokens=round(width * n))
            rounds[i] = Round(
                Proposal(
                    (
                        Part(TokenSource.DRAFT, [1] * k, exchange=propose, confidences=confidences),
                        Part(TokenSource.LOOKUP, [1] * looked_up),
                    )
                ),
                Verdict(accepted, 1, exchange=exchange),
                Commit([1] * (accepted + 1), accepted),
                started_at,
                self.now,
            )
        return rounds

    def _matches(self, i: int) -> list[Match]:
        has_match, follows = self._has_match.get(i, False), self.world.match_follows
        for _ in range(1 if follows is None else self._num_emitted.get(i, 1)):
            part = self.world.matches if follows is None or not has_match else follows
            has_match = self.random.random() < part
        self._has_match[i] = has_match
        return [Match(TokenSource.LOOKUP, [1] * 32, 8)] if has_match else []

    def _proposal(self, i: int, plan: Plan) -> tuple[list[float], int]:
        """Return the proposal of a plan: the one that was asked for in the round before, if rounds ask ahead."""
        if not self.world.asks_ahead:
            return self._propose(self.world.acceptance(i), plan)
        confidences, num_accepted = self._ahead.get(i, ([], 0))
        limit = plan.limit(TokenSource.DRAFT)
        return confidences[:limit], min(num_accepted, limit)

    def _look_up(self, plan: Plan, confidences: list[float], accepted: int) -> tuple[int, int]:
        """Return how many looked-up tokens follow the drafted ones, and how many of them are accepted."""
        drafted_all = accepted == len(confidences)
        accepted_of_lookup, limit = 0, plan.limit(TokenSource.LOOKUP, plan.limit(TokenSource.DRAFT))
        while accepted_of_lookup < limit and self.random.random() < self.world.lookup:
            accepted_of_lookup += 1
        return limit, accepted_of_lookup if drafted_all else 0

    def _propose(self, acceptance: float, plan: Plan) -> tuple[list[float], int]:
        """Return the confidences of a proposal, which ends as the draft worker's do, and how many are accepted."""
        confidences: list[float] = []
        accepted: list[bool] = []
        for _ in range(plan.limit(TokenSource.DRAFT)):
            # Tokens are easy or hard; their mean acceptance is the session's.
            easy = self.random.random() < acceptance
            p = (0.97 if easy else 0.1) if self.world.informative else acceptance
            confidences.append(min(max(p, 0.5), 1.0) if self.world.informative else 0.9)
            accepted.append(self.random.random() < p)
            products = list(accumulate(confidences[:-1], mul))
            if any(product < least for product, least in zip(products, plan.min_confidences, strict=False)):
                break
        return confidences, next((i for i, ok in enumerate(accepted) if not ok), len(accepted))

"""A simulation of several sessions that share two workers, as events in time."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

import numpy as np

from coordinator.plan import Plan
from coordinator.round import Exchange, Proposal, Round, Verdict
from coordinator.session import Session
from coordinator.speculation import Speculation
from specd.sampling import Sampling
from specd.step_costs import StepCosts
from specd.worker.schedule import Schedule, StepTime

# Milliseconds of a step by what it is for, as measured on two cores: of the target by tokens in all, of the draft by
# sessions.
TARGET = {1: 7.0, 4: 8.7, 8: 11.0, 16: 14.5, 32: 24.0, 64: 45.0, 128: 85.0, 256: 170.0}
DRAFT = {1: 0.8, 4: 1.2, 16: 2.2, 32: 4.2}
# By how much a step takes longer while the other worker computes too.
TARGET_SLOWED, DRAFT_SLOWED = 1.45, 1.2
ON_THE_WAY_SECONDS = 0.0005  # between coordinator and worker, one way
CALIBRATED = {1: (1, 2, 4, 8, 16), 4: (1, 4, 8), 16: (1, 8)}
MAX_TOKENS = 100  # of each session

# What the draft would say at a place: how confident it is, and how likely the target says the same.
Guess = Callable[[random.Random, int], tuple[float, float]]


def target_seconds(num_sessions: int, num_tokens: int) -> float:
    return float(np.interp(num_tokens, [*TARGET], [*TARGET.values()])) / 1000


def draft_seconds(num_sessions: int, num_tokens: int) -> float:
    return float(np.interp(num_sessions, [*DRAFT], [*DRAFT.values()])) / 1000


def proposal_length(confidences: Iterable[float], min_confidences: Sequence[float], most: int) -> int:
    """Return where a proposal ends: a token late, as the draft worker ends it."""
    for i, (least, product) in enumerate(zip(min_confidences, accumulate(confidences, mul), strict=False)):
        if product < least:
            return min(i + 2, most)
    return most


@dataclass(frozen=True)
class Feed:
    num_tokens: int
    wants_logits: bool = True
    can_wait: bool = False


@dataclass(eq=False)
class Job:
    """A request; `on_step` is called when a step of it is over, and gives it the next feed until it has ended."""

    session: object
    feed: Feed | None
    on_step: Callable[[Job], None]
    submitted_at: float
    compute_seconds: float = 0.0
    num_sessions: int = 1
    step_tokens: int = 0

    def exchange(self, now: float) -> Exchange:
        queue_seconds = now - self.submitted_at - self.compute_seconds
        return Exchange(
            queue_seconds,
            self.compute_seconds,
            2 * ON_THE_WAY_SECONDS,
            num_sessions=self.num_sessions,
            step_tokens=self.step_tokens,
        )


class Worker:
    """A worker's engine, with its real schedule. A step takes what it would alone, stretched while both compute."""

    def __init__(self, seconds: Callable[[int, int], float], slowed: float) -> None:
        self.seconds = seconds
        self.slowed = slowed
        self.costs = StepCosts(
            {
                sessions: {width: seconds(sessions, sessions * width) for width in widths}
                for sessions, widths in CALIBRATED.items()
            }
        )
        self.schedule: Schedule[Job] = Schedule(shares_cores=True)
        self.schedule.window.expect(self.costs.fixed_seconds)
        self.step: list[Job] = []
        self.seconds_left = 0.0
        self.started_at = 0.0
        self.wakes_at: float | None = None
        self.rows = Counter[int]()  # steps by the number of their sessions

    def submit(self, job: Job) -> None:
        self.schedule.window.arrived(job.session, job.submitted_at)
        self.schedule.add(job, job.submitted_at)

    def begin_step(self, now: float, jitter: float) -> None:
        if not self.step:
            self.step, self.wakes_at = self.schedule.next_step(now)
            self.seconds_left = jitter * self.seconds(len(self.step), self._num_tokens()) if self.step else 0.0
            self.started_at = now

    def end_step(self, now: float) -> None:
        took, num_tokens = now - self.started_at, self._num_tokens()
        step, self.step = self.step, []
        self.rows[len(step)] += 1
        for job in step:
            job.compute_seconds += took
            job.num_sessions, job.step_tokens = len(step), num_tokens
            job.feed = None
            job.on_step(job)
            if job.feed is not None:
                self.schedule.add(job, now)
            else:
                self.schedule.window.answered(job.session, now)
        self.schedule.stepped(StepTime(len(step), num_tokens, is_prefill=False, seconds=took), now)

    def _num_tokens(self) -> int:
        return sum(job.feed.num_tokens for job in self.step if job.feed is not None)


@dataclass
class Link:
    step_costs: StepCosts | None


@dataclass(eq=False)
class Client:
    """Somebody who always has a session under way, and what its text will be."""

    k: int | None = None
    text: random.Random = field(default_factory=random.Random)
    session: Session = field(default_factory=lambda: Session("s", [0], MAX_TOKENS, frozenset()))
    guesses: list[tuple[float, bool]] = field(default_factory=list)


class SimulatedLoad:
    """Lets so many clients decode, with k draft tokens each round if it is given; `guess` may be changed."""

    def __init__(self, num_sessions: int, k: int | None, guess: Guess, *, seed: int = 0) -> None:
        self.now = 1000.0
        self.num_tokens = 0
        self.chosen = Counter[int]()
        self.target, self.draft = Worker(target_seconds, TARGET_SLOWED), Worker(draft_seconds, DRAFT_SLOWED)
        self.guess = guess
        self._noise = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._speculation = Speculation(
            Link(self.target.costs),
            Link(self.draft.costs),
            draft_ahead="never",
            clock=lambda: self.now,
        )
        self._seed = 1000 * seed
        self.add_clients(num_sessions, k)

    def add_clients(self, count: int, k: int | None = None) -> None:
        """Let more clients come, one after another."""
        for i in range(count):
            self._after(0.01 * i, lambda: self._begin(Client(k)))

    def tokens_per_second(self, seconds: float) -> float:
        """Go on for so long."""
        first, until = self.num_tokens, self.now + seconds
        while self.now < until:
            self._go_on()
        return (self.num_tokens - first) / seconds

    def _go_on(self) -> None:
        """Go on to whatever is next: the end of a step, of a wait for stragglers, or a message."""
        workers = self.target, self.draft
        for worker in workers:
            worker.begin_step(self.now, self._noise.uniform(0.95, 1.05))
        both = all(worker.step for worker in workers)
        times = [self._events[0][0]] if self._events else []
        times += [self.now + w.seconds_left * (w.slowed if both else 1.0) for w in workers if w.step]
        times += [worker.wakes_at for worker in workers if worker.wakes_at is not None]
        passed = max(min(times) - self.now, 1e-9)
        self.now += passed
        for worker in workers:
            if worker.step:
                worker.seconds_left -= passed / (worker.slowed if both else 1.0)
                if worker.seconds_left <= 1e-9:
                    worker.end_step(self.now)
        while self._events and self._events[0][0] <= self.now:
            heapq.heappop(self._events)[2]()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), action))

    def _begin(self, client: Client) -> None:
        self._seed += 1
        client.text = random.Random(self._seed)  # the same, however much of the one before was looked at
        client.session = Session("s", [0], MAX_TOKENS, frozenset())
        client.guesses = []
        speculation = self._speculation.begin(Sampling(), client.k)

        def begin_round() -> None:
            session, started_at, is_first = client.session, self.now, client.session.num_generated == 0
            plan = session.bound(speculation.plan())

            def commit(proposal: Proposal, verdict: Verdict) -> None:
                commit = session.commit(proposal.token_ids, verdict.num_accepted, verdict.next_token_id)
                round_ = Round(proposal, verdict, commit, started_at, self.now)
                if not is_first:
                    speculation.observe(plan, round_)
                    self.chosen[round_.num_proposed] += 1
                self.num_tokens += len(commit.token_ids)
                if session.finish_reason is None:
                    begin_round()
                else:
                    speculation.close()
                    self._begin(client)

            self._propose(client, plan, lambda proposal: self._verify(client, proposal, commit))

        begin_round()

    def _propose(self, client: Client, plan: Plan, then: Callable[[Proposal], None]) -> None:
        if plan.num_draft_tokens == 0:
            then(Proposal([]))
            return
        confidences = [self._at(client, i)[0] for i in range(plan.num_draft_tokens)] if plan.min_confidences else []
        length = left = proposal_length(confidences, plan.min_confidences, plan.num_draft_tokens)

        def on_step(job: Job) -> None:
            nonlocal left
            left -= 1
            if left:
                job.feed = Feed(1)
                return
            proposal = Proposal([1] * length, exchange=job.exchange(self.now), confidences=confidences[:length])
            self._after(ON_THE_WAY_SECONDS, lambda: then(proposal))

        self._after(ON_THE_WAY_SECONDS, lambda: self.draft.submit(Job(client, Feed(2), on_step, self.now)))

    def _verify(self, client: Client, proposal: Proposal, then: Callable[[Proposal, Verdict], None]) -> None:
        num_proposed = len(proposal.token_ids)

        def on_step(job: Job) -> None:
            num_accepted = next((i for i in range(num_proposed) if not self._at(client, i)[1]), num_proposed)
            verdict = Verdict(num_accepted, 2, exchange=job.exchange(self.now))
            self._after(ON_THE_WAY_SECONDS, lambda: then(proposal, verdict))

        feed = Feed(num_proposed + 1)
        self._after(ON_THE_WAY_SECONDS, lambda: self.target.submit(Job(client, feed, on_step, self.now)))

    def _at(self, client: Client, ahead: int) -> tuple[float, bool]:
        """Return the draft's confidence in the token that is so far ahead, and whether the target says the same."""
        place = client.session.num_generated + ahead
        while len(client.guesses) <= place:
            confidence, probability = self.guess(client.text, len(client.guesses))
            client.guesses.append((confidence, client.text.random() < probability))
        return client.guesses[place]

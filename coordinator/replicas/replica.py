"""A target worker, with all that the coordinator keeps for it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from coordinator.core import Exchange
from coordinator.planner.memory import Memory
from coordinator.planner.planner import Planner
from coordinator.planner.round_costs import RoundCosts
from coordinator.planner.running import Running
from coordinator.replicas.prefix_estimate import CachedPart, PrefixEstimate
from coordinator.sessions.capacity import Capacity
from coordinator.sessions.place import Place, Prompt
from coordinator.workers.remote_worker import RemoteWorker
from coordinator.workers.verifier import TargetStream
from specd.model_info import ModelInfo
from specd.step_costs import MovingAverage, StepCosts

_WEIGHT = 0.1  # of a prefill in the average cost of a token
_MOST_CACHED_TOKENS = 2**23  # in an estimate, however large a target calls its cache
_LEAST_PREFILL_TOKENS = 32  # of a prefill that says something about that cost
_MOST_IDLE_SECONDS = 60.0  # after which measured times say nothing about a target


@dataclass(frozen=True)
class Slowness:
    """The times of a token of a prompt and of a generated one, relative to calibration."""

    prefill: float = 1.0
    decoding: float = 1.0


@dataclass(frozen=True)
class DraftFacts:
    """The costs and models of the drafts that propose for the same sessions, as they are now."""

    costs: Callable[[], StepCosts | None]
    models: Callable[[], Iterable[ModelInfo | None]]


@dataclass
class _Learner:
    """A planner, and what is kept of it."""

    facts: DraftFacts
    planner: Planner
    memory: Memory
    has_recalled: bool = False


class Replica:
    """One of the targets that serve the same model: its costs and planner, its room, and its probable prefixes."""

    def __init__(
        self,
        worker: RemoteWorker[TargetStream],
        *,
        draft: DraftFacts,
        canary: DraftFacts | None = None,
        canary_leads: Callable[[], bool] = lambda: False,
        max_sessions: int,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`draft` proposes for its sessions, and a `canary` for some of them, or for all while `canary_leads`.

        `name` is the one in metrics. `clock` returns seconds.
        """
        self.worker, self.name, self._clock = worker, name, clock
        running = Running()

        def learner(facts: DraftFacts) -> _Learner:
            planner = Planner(RoundCosts(lambda: worker.step_costs, facts.costs), running)
            return _Learner(facts, planner, Memory(planner, lambda: (worker.model, *facts.models())))

        self._learners = [learner(facts) for facts in (draft, canary) if facts is not None]
        self._canary_leads = canary_leads
        self.capacity = Capacity(
            lambda: worker.cache_bytes,
            lambda *num_tokens: worker.footprint.bytes_for(*num_tokens),  # noqa: PLW0108 - of now
            max_sessions=max_sessions,
            seconds_per_token=lambda num_sessions: self.planner.seconds_per_token(num_sessions),  # noqa: PLW0108 - of now
        )
        self._prefixes = PrefixEstimate(lambda: min(worker.prefix_cache_tokens, _MOST_CACHED_TOKENS))
        self._life = worker.life.incarnation  # of which they are
        self._cached = WeakKeyDictionary[Place, CachedPart]()  # what was expected, by session
        self._prefill_seconds = MovingAverage(_WEIGHT)  # of a token
        self._taken_at = -math.inf  # when it got its latest session

    @property
    def planner(self) -> Planner:
        """The planner of most sessions."""
        return self.planner_of(is_canary=self._canary_leads())

    def planner_of(self, *, is_canary: bool) -> Planner:
        """Return the planner of the sessions for which the canary proposes, or of the others: neither mislead these."""
        return self._learners[is_canary].planner

    @property
    def planner_memories(self) -> list[Memory]:
        """The memory of each planner, but not of a canary that has never been there."""
        present, *canaries = self._learners
        return [present.memory, *(each.memory for each in canaries if each.has_recalled)]

    def recall_learnt(self) -> None:
        """Begin with the kept knowledge of each pair, once the models are known."""
        if self.worker.model is None:
            return
        present, *canaries = self._learners
        for learner in (present, *(each for each in canaries if None not in each.facts.models())):
            if not learner.has_recalled:
                learner.has_recalled = True
                learner.memory.recall()

    def take(self, place: Place) -> None:
        """Expect a session to prefill its prompt here."""
        self._taken_at = self._clock()
        self._cached[place] = part = self._find_cached(place.prompt)
        self._prefixes.add(place.prompt.blocks)
        place.num_prefilling = place.prompt.num_tokens - part.num_tokens

    def prefilled(self, place: Place, num_reused: int, exchange: Exchange) -> None:
        """Learn from the first verdict of a session, for which it took this many tokens from the prefix cache."""
        self._prefixes.correct(self._cached.get(place, CachedPart()), num_reused)
        if (num_tokens := place.prompt.num_tokens - num_reused) >= _LEAST_PREFILL_TOKENS:
            self._prefill_seconds.add(exchange.compute_seconds / num_tokens)

    @property
    def slowness(self) -> Slowness | None:
        """The recently measured times relative to calibration; None before the first measurement and after a pause."""
        is_recent = self.capacity.num_running > 0 or self._clock() < self._taken_at + _MOST_IDLE_SECONDS
        if not is_recent or self.worker.step_costs is None or not self._prefill_seconds.value:
            return None
        return Slowness(
            self._prefill_seconds.value / self._calibrated_prefill_seconds(),
            self._seconds_per_token(1) / self.worker.step_costs.seconds(1, 1),
        )

    def expected_seconds(self, prompt: Prompt, num_generated: float, usual: Slowness) -> float:
        """Return the time in which a session would prefill and generate this many tokens here, beside the others.

        A target without recent measurements is taken to be as slow as is usual now.
        """
        num_tokens = prompt.num_tokens - self._find_cached(prompt).num_tokens + self.capacity.prefilling_tokens
        num_sessions, costs = self.capacity.num_running + 1, self.worker.step_costs
        if self.slowness is not None or costs is None:
            prefill, decoding = self._prefill_seconds.value, self._seconds_per_token(num_sessions)
        else:
            prefill = usual.prefill * self._calibrated_prefill_seconds()
            decoding = usual.decoding * costs.seconds(num_sessions, 1)
        return num_tokens * prefill + num_generated * decoding

    def _find_cached(self, prompt: Prompt) -> CachedPart:
        if self._life != self.worker.life.incarnation:
            self._prefixes.clear()
            self._life = self.worker.life.incarnation
        return self._prefixes.find(prompt.blocks)

    def _calibrated_prefill_seconds(self) -> float:
        costs, n = self.worker.step_costs, _LEAST_PREFILL_TOKENS
        return costs.seconds(1, n) / n if costs is not None else 0.0

    def _seconds_per_token(self, num_sessions: int) -> float:
        costs = self.worker.step_costs
        known = self.planner.seconds_per_token(num_sessions)
        return known or (costs.seconds(num_sessions, 1) if costs is not None else 0.0)

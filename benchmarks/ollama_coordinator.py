"""A coordinator with another planner: the depth controller of Ollama's MLX runner, re-derived from its description.

    python benchmarks/ollama_coordinator.py coordinator --target unix:/tmp/target …

The description (ollama/ollama#16791): expected tokens per second by depth, from a moving average of acceptance by
position and a measured cost curve; depth 0 as the floor; other depths are probed, less often the longer they lose.
It has one controller for all sessions. `benchmarks/planners.py` measures it beside ours.
"""

from __future__ import annotations

import sys

import coordinator.coordinator
from coordinator.core import Plan, Round
from coordinator.planner.cost_model import CostModel
from specd.cli import main
from specd.sampling import Sampling
from specd.vocabulary import TokenSource

_MAX_DEPTH = 8
_WEIGHT = 0.1
_FIRST_PROBE_ROUNDS, _LAST_PROBE_ROUNDS = 16, 1024


class OllamaPlanner:
    """Chooses one depth for all sessions; takes the place of `coordinator.planner.planner.Planner`."""

    def __init__(self, cost_model: CostModel, **_: object) -> None:
        """Learn everything from the rounds: the workers' calibrated costs are not looked at."""
        self._accepted = [0.8] * _MAX_DEPTH  # P(position i accepted | those before it are)
        self._seconds: dict[int, float] = {}  # of a round by depth, measured
        self._rounds = 0
        self._probe_every = _FIRST_PROBE_ROUNDS
        self._probe_at = 1
        self._best = 4

    def begin(self, sampling: Sampling, num_draft_tokens: int | None = None) -> OllamaSession:
        """Begin to plan for a session."""
        return OllamaSession(self, num_draft_tokens)

    def next_depth(self) -> int:
        """Return the depth of the next round: the best one, or a neighbour or the floor when a probe is due."""
        self._rounds += 1
        if self._rounds < self._probe_at:
            return self._best
        self._probe_at = self._rounds + self._probe_every
        unknown = [depth for depth in (0, self._best + 1, self._best - 1) if 0 <= depth <= _MAX_DEPTH]
        unknown = [depth for depth in unknown if depth not in self._seconds] or unknown
        return unknown[(self._rounds // self._probe_every) % len(unknown)]

    def observe(self, depth: int, round_: Round) -> None:
        """Learn from a round, and choose the best depth anew."""
        num_accepted, num_proposed = round_.commit.num_accepted, round_.num_proposed
        for i in range(min(num_proposed, num_accepted + 1, _MAX_DEPTH)):
            self._accepted[i] += _WEIGHT * ((i < num_accepted) - self._accepted[i])
        known = self._seconds.setdefault(num_proposed, round_.seconds)
        self._seconds[num_proposed] = known + _WEIGHT * (min(round_.seconds, 4 * known) - known)
        before, self._best = self._best, max(range(_MAX_DEPTH + 1), key=self._rate)
        if depth != before:  # a probe
            lost = self._best == before
            self._probe_every = min(2 * self._probe_every, _LAST_PROBE_ROUNDS) if lost else _FIRST_PROBE_ROUNDS

    def _rate(self, depth: int) -> float:
        if depth not in self._seconds and not (self._seconds and depth <= max(self._seconds)):
            return 0.0
        tokens, probability = 1.0, 1.0
        for acceptance in self._accepted[:depth]:
            probability *= acceptance
            tokens += probability
        return tokens / self._cost(depth)

    def _cost(self, depth: int) -> float:
        """Return the measured seconds of a round, interpolated between measured depths."""
        if depth in self._seconds:
            return self._seconds[depth]
        below = max((known for known in self._seconds if known < depth), default=min(self._seconds))
        above = min((known for known in self._seconds if known > depth), default=below)
        low, high = self._seconds[below], self._seconds[above]
        return low if above == below else low + (high - low) * (depth - below) / (above - below)


class OllamaSession:
    """Plans the rounds of one session with the shared controller."""

    def __init__(self, shared: OllamaPlanner, fixed_k: int | None) -> None:
        self._shared = shared
        self._fixed_k = fixed_k

    def close(self) -> None:
        """End with the session."""

    def will_draft(self) -> bool:
        """Return whether the draft should have the prompt."""
        return self._fixed_k != 0

    def plan(self) -> Plan:
        """Plan the next round."""
        return Plan({TokenSource.DRAFT: self._shared.next_depth() if self._fixed_k is None else self._fixed_k})

    def observe(self, plan: Plan, round_: Round) -> float:
        """Learn from a round after the first."""
        if self._fixed_k is None and not round_.proposal.drafted.fault:
            self._shared.observe(plan.limit(TokenSource.DRAFT), round_)
        return 0.0


if __name__ == "__main__":
    coordinator.coordinator.Planner = OllamaPlanner  # type: ignore[attr-defined,assignment]
    main(sys.argv[1:])

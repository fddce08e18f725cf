"""How fast sessions are that run together."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from statistics import fmean

from coordinator.planner.planner import Planner
from coordinator.planner.policy import choose_k

_ROUNDS = 64  # of all sessions, for which a prediction holds: many are asked for at a time


class Speed:
    """Predicts what a token takes, of each of so many sessions that run together and are like the present ones."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._tokens_per_second: dict[int, float] = {}
        self._accepted: list[float] = []
        self._ends_at = 0

    def seconds_per_token(self, num_sessions: int) -> float:
        """Return what a token of each takes, with the best k of all; 0 before costs are known."""
        if self._planner.num_rounds >= self._ends_at:
            self._ends_at = self._planner.num_rounds + _ROUNDS
            of_sessions = [session.accepted() for session in self._planner.sessions]
            self._accepted = [fmean(of_position) for of_position in zip_longest(*of_sessions, fillvalue=0.0)]
            self._tokens_per_second.clear()
        if num_sessions not in self._tokens_per_second:
            costs = self._planner.cost_model.costs(num_sessions)
            if costs is None:
                return 0.0
            if num_sessions > 1:
                costs = replace(costs, draft_overhead=costs.draft_overhead + costs.draft_wait)
            accepted = self._accepted if costs.draft else []
            _, rate = choose_k(accepted, [1.0] * len(accepted), costs)
            self._tokens_per_second[num_sessions] = rate
        return 1 / self._tokens_per_second[num_sessions]

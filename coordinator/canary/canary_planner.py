"""Plans the rounds of a session while there is a canary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.canary.choice import CanaryChoice
from coordinator.core import Match, Plan, Round
from coordinator.planner.planner import Planner
from coordinator.planner.session_planner import SessionPlanner


class CanaryPlanner:
    """Plans each round with the planner of its draft, so that neither draft misleads the planner of the other."""

    def __init__(self, planner: SessionPlanner, choice: CanaryChoice, shared: Callable[[], Planner]) -> None:
        """`shared` returns the planner of all sessions with the chosen draft at the session's target."""
        self._planner, self._choice, self._shared = planner, choice, shared

    def will_draft(self) -> bool:
        """Return whether the draft is likely to be asked soon, so that it should have the prompt."""
        return self._planner.will_draft()

    def plan(self, matches: Sequence[Match]) -> Plan:
        """Choose the draft of the next round, and plan it."""
        self._choice.choose()
        if (shared := self._shared()) is not self._planner.shared:
            self._planner.move(shared)
        return self._planner.plan(matches)

    def ahead(self) -> Plan:
        """Return how many draft tokens the round after the planned one is likely to have."""
        return self._planner.ahead()

    def observe(self, plan: Plan, round_: Round) -> float:
        """Learn from a round after the first; return the target-only seconds for its tokens, 0 if not known."""
        seconds = self._planner.observe(plan, round_)
        self._choice.observe(plan, round_, self._planner.shared.costs, alone=self._planner.runs_alone)
        return seconds

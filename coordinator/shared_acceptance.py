"""What is known of the proposals of all sessions that are alike."""

from __future__ import annotations

from coordinator.acceptance_levels import AcceptanceLevels
from coordinator.hazards import Hazards


class SharedAcceptance:
    """Of which levels such sessions are, how far their proposals go, and how what is accepted differs by place."""

    def __init__(self) -> None:
        self.levels = AcceptanceLevels()
        self._reached = Hazards()
        self._accepted = Hazards()

    def observe(self, most: int, num_proposed: int, num_accepted: int, expected: float) -> None:
        """Learn from a round that could have had `most` draft tokens, each of which was so likely to be accepted."""
        self._reached.observe(most, num_proposed)
        self._accepted.observe(most, num_accepted, expected)

    def reached(self) -> list[float]:
        """Return the part that goes on at each place."""
        return self._reached.alone()

    def accepted_by_place(self) -> list[float]:
        """Return how many times as often as expected of the session a token is accepted at each place."""
        return self._accepted.in_comparison()

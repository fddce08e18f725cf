"""What becomes of a session's proposals, estimated online."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from coordinator.hazards import Hazards
from coordinator.level_belief import LevelBelief
from coordinator.shared_acceptance import SharedAcceptance

_LARGEST_HAZARD = 0.995


class AcceptanceEstimate:
    """Estimates, place by place, how often a session's proposals go so far and how often they are accepted so far.

    What is estimated is the part that goes on, or is accepted, of those that did so up to the place before. How much is
    accepted at all is a belief about the session, by its own rounds and by what other sessions were; how that differs
    by place, and where proposals end early, is known from all rounds, and each place leans on that. So the first rounds
    of a session go by the sessions before it, and places that were never tried by the others.
    """

    def __init__(self, shared: SharedAcceptance) -> None:
        self._shared = shared
        self._level = LevelBelief(shared.levels)
        self._reached = Hazards()
        self._accepted = Hazards()

    def observe(self, most: int, num_proposed: int, num_accepted: int) -> None:
        """Learn from a round that could have had `most` draft tokens."""
        self._reached.observe(most, num_proposed)
        self._accepted.observe(most, num_accepted)
        self._shared.observe(most, num_proposed, num_accepted, self._level.expected)
        self._level.observe(num_accepted, is_cut=num_accepted < num_proposed)

    def fade(self) -> None:
        """Count a round that could not have a proposal."""
        self._reached.fade()
        self._accepted.fade()
        self._level.fade()

    def reached(self) -> list[float]:
        """Return the part of the proposals that have a token at each place, where they may go so far."""
        return list(accumulate(self._reached.with_others(self._shared.reached()), mul))

    def accepted(self) -> list[float]:
        """Return the part of the proposals whose tokens up to each place are all accepted."""
        hazard = self._level.hoped_for
        by_place = [min(hazard * times, _LARGEST_HAZARD) for times in self._shared.accepted_by_place()]
        return list(accumulate(self._accepted.leaning_on(by_place), mul))

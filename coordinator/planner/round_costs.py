"""Seconds of a round by number of sessions and of draft tokens: calibrated at first, measured in operation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from specd.step_costs import StepCosts, bounded_ratio

_LEVEL_WEIGHT = 0.1  # of a round of all sessions; the level follows contexts that grow and machines that get busy
_MOST_COMPARED = 10  # comparisons that the ratio below remembers


@dataclass
class Measured:
    """What rounds of about the same number of sessions take, relative to calibration.

    A round takes `level` times the calibrated seconds, and with draft tokens also `drafting` times: calibration sees
    neither the wire, nor the cold caches between steps, nor the time that sessions wait for each other.
    """

    level: float = 1.0
    drafting: float = 1.0
    num_compared: int = 0
    num_rounds: float = 0.0
    drafted: bool | None = None  # whether the latest rounds had draft tokens


class RoundCosts:
    """Both workers' calibrated costs, None as long as they are not known, corrected by measured rounds."""

    def __init__(self, target: Callable[[], StepCosts | None], draft: Callable[[], StepCosts | None]) -> None:
        self.target, self.draft = target, draft
        self.measured: dict[int, Measured] = {}  # by class of numbers of sessions

    def seconds(self, num_sessions: int, k: float, num_matched_tokens: float = 0.0) -> float:
        """Return the seconds of a round in which each session has these tokens in mean; the target must have come."""
        target, draft, own = self.target(), self.draft(), self._of(num_sessions)
        assert target is not None
        verify = target.mixed_seconds(num_sessions, 1 + k + num_matched_tokens)
        if not k or draft is None:
            return own.level * verify
        return own.level * own.drafting * (verify + draft.seconds(num_sessions, k))

    def proposing_seconds(self, num_sessions: int, k: float) -> float:
        """Return how much longer a round with k draft tokens takes than one with as many tokens that cost nothing.

        It is more than the draft's own seconds: a proposal also pushes the target's weights out of caches.
        """
        return self.seconds(num_sessions, k) - self.seconds(num_sessions, 0, k)

    def observe(
        self, num_sessions: int, drafted: bool, seconds: float, expected_seconds: float, num_rounds: float
    ) -> None:
        """Learn from some rounds of all sessions, with or without draft tokens: how long they took."""
        surprise = bounded_ratio(seconds, expected_seconds)
        own = self.measured.setdefault(size_class(num_sessions), self._of(num_sessions))
        before, own.drafted = own.drafted, drafted
        own.num_rounds += num_rounds
        if before in {None, own.drafted}:
            own.level *= surprise ** max(1 - (1 - _LEVEL_WEIGHT) ** num_rounds, num_rounds / own.num_rounds)
        else:  # the level is that of moments ago
            own.num_compared = min(own.num_compared + 1, _MOST_COMPARED)
            own.drafting *= surprise ** ((1 if drafted else -1) / own.num_compared)

    def _of(self, num_sessions: int) -> Measured:
        """Return what was measured of about as many sessions, or else of the nearest number."""
        wanted = size_class(num_sessions)
        if not self.measured:
            return Measured()
        nearest = min(self.measured, key=lambda known: abs(known - wanted))
        own = self.measured[nearest]
        return own if nearest == wanted else Measured(own.level, own.drafting)


def size_class(num_sessions: int) -> int:
    """Return the same for numbers of sessions that cost about as much: 1, 2, 3, 4, 5-6, 7-8, 9-10, 11-13, ..."""
    return round(2 * math.log2(num_sessions))

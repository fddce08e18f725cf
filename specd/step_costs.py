"""What a step of a model costs: the measured curve that k is chosen by."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

# How much one real step changes the level of all costs, and that of its own width beyond them. Levels move soon, since
# they follow contexts that grow and machines that get busy; the shape is the model's and the device's, and stays.
_LEVEL_WEIGHT = 0.1
_SHAPE_WEIGHT = 0.02

# A single step can take any time: a page that is swapped in, a laptop that wakes up.
_LARGEST_SURPRISE = 4.0


class StepCosts:
    """Seconds that a step takes, by the number of sessions that it is for and of tokens that each of them brings.

    Measured at some widths for some numbers of sessions, and interpolated in between, because the curve is neither
    linear nor even monotonic (an eighth token can be cheaper than a fifth). If it is known for one number of sessions
    only, more of them take as long as these do for as many tokens. `observe` refreshes it in operation.
    """

    def __init__(self, measured: Mapping[int, Mapping[int, float]]) -> None:
        """Use seconds by sessions and width, at least one for each number of sessions."""
        self._curves = {sessions: dict(sorted(curve.items())) for sessions, curve in sorted(measured.items())}
        self._level = 1.0
        assert self._curves
        assert all(self._curves.values())
        assert all(0 < seconds < math.inf for curve in self._curves.values() for seconds in curve.values())

    @property
    def measured(self) -> dict[int, dict[int, float]]:
        """The seconds at the widths and numbers of sessions that were measured, refreshed by what was observed."""
        return {
            sessions: {width: seconds * self._level for width, seconds in curve.items()}
            for sessions, curve in self._curves.items()
        }

    def seconds(self, sessions: float, width: float) -> float:
        """Estimate a step for so many sessions, with so many tokens each."""
        if len(self._curves) == 1:
            ((known, curve),) = self._curves.items()
            return self._level * _interpolate(curve, width * max(sessions / known, 1.0))
        at = {known: _interpolate(curve, width) for known, curve in self._curves.items()}
        return self._level * _interpolate(at, sessions)

    @property
    def fixed_seconds(self) -> float:
        """What one step saves in place of two that take in a token each."""
        return max(2 * self.seconds(1, 1) - self.seconds(2, 1), 0.0)

    def cheapest_width(self, sessions: int, width: int) -> int:
        """Return the width, no smaller than this, whose step takes least: kernels prefer some numbers of rows."""
        wider = (known for known in self._curves[min(self._curves)] if known > width)
        best = min(wider, key=lambda known: self.seconds(sessions, known), default=width)
        # Not for what may be noise.
        return best if self.seconds(sessions, best) < 0.97 * self.seconds(sessions, width) else width

    def observe(self, sessions: float, width: float, seconds: float, *, part: float = 1.0) -> None:
        """Learn what a real step took, or `part` of it if others say the same."""
        surprise = min(max(seconds / self.seconds(sessions, width), 1 / _LARGEST_SURPRISE), _LARGEST_SURPRISE)
        self._level *= surprise ** (_LEVEL_WEIGHT * part)
        nearest = min(self._curves, key=lambda known: abs(math.log(known / sessions)))
        curve = self._curves[nearest]
        if len(self._curves) == 1:
            width *= max(sessions / nearest, 1.0)
        elif sessions > nearest == max(self._curves):
            return  # the line that goes on there would carry a change of its end too far
        if width in curve:
            curve[int(width)] *= surprise ** (_SHAPE_WEIGHT * part)


def _interpolate(values: Mapping[int, float], x: float) -> float:
    """Draw lines between the values, and the outer ones on beyond them, but not below zero slope."""
    places: Sequence[int] = list(values)
    if len(places) == 1 or x <= places[0]:
        return values[places[0]]
    i = min(bisect_left(places, x), len(places) - 1)
    left, right = places[i - 1], places[i]
    slope = (values[right] - values[left]) / (right - left)
    if x > right:
        return values[right] + max(slope, 0.0) * (x - right)
    return values[left] + slope * (x - left)

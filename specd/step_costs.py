"""Measured costs: seconds by number of sessions and of tokens, refreshed in operation."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

# Weight of one observation in the level of all costs. Levels follow contexts that grow and machines that get busy.
_LEVEL_WEIGHT = 0.1
# Weight of one observation in the cost of its own width, for each observation since the last one of that width, up to
# the bound: what is seen often moves slowly, and a control round, one in many, still corrects the target-only cost.
_SHAPE_WEIGHT = 0.005
_LARGEST_SHAPE_WEIGHT = 0.2
# A single observation can be off by any factor: another session's prompt, a page that is swapped in, a laptop that
# wakes up.
_LARGEST_RATIO = 4.0


class MovingAverage:
    """An exponential moving average, in which each new value has this weight."""

    def __init__(self, weight: float) -> None:
        """Start from the first value; before, it is 0."""
        self.value, self._weight, self._is_empty = 0.0, weight, True

    def add(self, value: float) -> None:
        """Add a value."""
        self.value += (value - self.value) * (1.0 if self._is_empty else self._weight)
        self._is_empty = False


class StepCosts:
    """Seconds of a step for `sessions` sessions with `width` tokens each. A draft's step is a whole proposal.

    Measured values are interpolated: the curve is neither linear nor monotonic (an eighth token can be cheaper than a
    fifth). If one number of sessions was measured, more of them cost as much as one with all their tokens.
    """

    def __init__(self, measured: Mapping[int, Mapping[int, float]]) -> None:
        """Take seconds by sessions and width, at least one width for each number of sessions."""
        self._curves = {sessions: dict(sorted(curve.items())) for sessions, curve in sorted(measured.items())}
        self._level = 1.0
        self._num_observed = 0
        self._observed_at: dict[tuple[int, float], int] = {}
        assert self._curves
        assert all(self._curves.values())
        assert all(0 < seconds < math.inf for curve in self._curves.values() for seconds in curve.values())

    @property
    def measured(self) -> dict[int, dict[int, float]]:
        """The costs at the measured sessions and widths, as refreshed."""
        return {n: {width: s * self._level for width, s in curve.items()} for n, curve in self._curves.items()}

    def seconds(self, sessions: float, width: float) -> float:
        """Return the seconds of a step for `sessions` sessions with `width` tokens each."""
        if len(self._curves) == 1:
            ((known, curve),) = self._curves.items()
            return self._level * interpolate(curve, width * max(sessions / known, 1.0))
        if (own := self._curves.get(sessions)) is not None:  # type: ignore[call-overload]
            return self._level * interpolate(own, width)
        numbers = list(self._curves)
        i = min(max(bisect_left(numbers, sessions), 1), len(numbers) - 1)
        near = {number: interpolate(self._curves[number], width) for number in numbers[i - 1 : i + 1]}
        return self._level * interpolate(near, sessions)

    def mixed_seconds(self, sessions: float, width: float) -> float:
        """Return the seconds of a step for `sessions` sessions with `width` tokens each in mean, of different widths.

        Kernels compute rows in blocks, so a fifth row can cost nearly as much as four more. Between whole widths, the
        costs grow as those of one session with as many rows do.
        """
        lower, upper = math.floor(width), math.ceil(width)
        least = self.seconds(sessions, lower)
        if lower == upper:
            return least
        rows = [self.seconds(1, sessions * each) for each in (lower, width, upper)]
        part = (rows[1] - rows[0]) / (rows[2] - rows[0]) if rows[2] > rows[0] else width - lower
        return least + min(max(part, 0.0), 1.0) * (self.seconds(sessions, upper) - least)

    @property
    def fixed_seconds(self) -> float:
        """The seconds that one step for two sessions saves, compared with two steps for one session each."""
        return max(2 * self.seconds(1, 1) - self.seconds(2, 1), 0.0)

    def cheapest_width(self, sessions: int, width: int) -> int:
        """Return the width, no smaller than this one, with the cheapest step: kernels prefer some numbers of rows."""
        wider = (known for known in self._curves[min(self._curves)] if known > width)
        best = min(wider, key=lambda known: self.seconds(sessions, known), default=width)
        # Another kernel makes a large difference. A small one may be noise, and what is padded is not seen again.
        return best if self.seconds(sessions, best) < 0.92 * self.seconds(sessions, width) else width

    def observe(self, sessions: float, width: float, seconds: float, *, weight: float = 1.0) -> None:
        """Learn from a step that took `seconds`; `weight` is its part in one observation that several report."""
        ratio = bounded_ratio(seconds, self.seconds(sessions, width))
        self._level *= ratio ** (_LEVEL_WEIGHT * weight)
        self._num_observed += 1
        nearest = min(self._curves, key=lambda known: abs(math.log(known / sessions)))
        curve = self._curves[nearest]
        if len(self._curves) == 1:
            width *= max(sessions / nearest, 1.0)
        elif sessions > nearest == max(self._curves):
            return  # extrapolation beyond the calibrated range would amplify the change
        if width in curve:
            age = self._num_observed - self._observed_at.get((nearest, width), 0)
            curve[int(width)] *= ratio ** (min(_SHAPE_WEIGHT * age, _LARGEST_SHAPE_WEIGHT) * weight)
            self._observed_at[nearest, width] = self._num_observed


def bounded_ratio(seconds: float, expected: float) -> float:
    """Return the ratio of measured to expected seconds, within the bounds that one observation may change."""
    return min(max(seconds / expected, 1 / _LARGEST_RATIO), _LARGEST_RATIO)


def interpolate(values: Mapping[int, float], x: float) -> float:
    """Interpolate linearly, and extrapolate the last segment, but with no negative slope."""
    xs: Sequence[int] = list(values)
    if len(xs) == 1 or x <= xs[0]:
        return values[xs[0]]
    i = min(bisect_left(xs, x), len(xs) - 1)
    left, right = xs[i - 1], xs[i]
    slope = (values[right] - values[left]) / (right - left)
    if x > right:
        return values[right] + max(slope, 0.0) * (x - right)
    return values[left] + slope * (x - left)

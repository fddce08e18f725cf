"""A moving average."""

from __future__ import annotations


class MovingAverage:
    """An average to which each new value counts with the same weight, in (0, 1], and older ones less and less."""

    def __init__(self, weight: float, guess: float | None = None) -> None:
        """Begin with a guess, or else with 0 until the first value, which then counts alone."""
        self.value = guess or 0.0
        self._weight = weight
        self._is_empty = guess is None

    def add(self, value: float) -> None:
        """Take in a value."""
        self.value += (value - self.value) * (1.0 if self._is_empty else self._weight)
        self._is_empty = False

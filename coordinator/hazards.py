"""How often proposals get past each place."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

from specd.settings import MAX_NUM_DRAFT_TOKENS

# Each round takes this much weight from those before it: text changes, and acceptance with it.
_DECAY = 1 / 64
# Each round without a proposal takes this much of what is known of a session alone: a run of bad luck that ended its
# proposals must not keep it from them, if others like it have them.
_FADING = 1 / 16

# How many tokens' worth it is that proposals go as far as they may, before anything is known.
_FIRST_WEIGHT = 4.0
# How many tokens' worth what is known of others counts: of all places for one, of all sessions for one.
_PLACE_WEIGHT = 4.0
_SHARED_WEIGHT = 16.0

_PLACES = range(MAX_NUM_DRAFT_TOKENS)


class Hazards:
    """By place, how many came up to it, or were to get past it, and how many of these did; decaying."""

    def __init__(self) -> None:
        self._came = [0.0] * len(_PLACES)
        self._passed = [0.0] * len(_PLACES)

    def observe(self, most: int, num_passed: int, expected: float = 1.0) -> None:
        """Learn from a proposal that could have had `most` tokens, each of which was so likely to get past."""
        for place in range(min(most, num_passed + 1)):
            self._came[place] += expected - self._came[place] * _DECAY
            self._passed[place] += (place < num_passed) - self._passed[place] * _DECAY

    def fade(self) -> None:
        """Count a round that could not have a proposal."""
        self._came = [weight * (1 - _FADING) for weight in self._came]
        self._passed = [weight * (1 - _FADING) for weight in self._passed]

    def alone(self) -> list[float]:
        """Return the part that gets past each place, of those that come to it, by what is known here."""
        overall = (_FIRST_WEIGHT + sum(self._passed)) / (_FIRST_WEIGHT + sum(self._came))
        return self.leaning_on([overall] * len(_PLACES))

    def with_others(self, others: Sequence[float]) -> list[float]:
        """Return it by what is known of others too, from which this may differ, at all places alike."""
        expected = sum(map(mul, self._came, others))
        tilt = (_SHARED_WEIGHT + sum(self._passed)) / (_SHARED_WEIGHT + expected)
        return self.leaning_on([min(other * tilt, 1.0) for other in others])

    def leaning_on(self, prior: Sequence[float]) -> list[float]:
        """Return it by what is known here of each place, and by what is expected of it."""
        return [
            (_PLACE_WEIGHT * expected + passed) / (_PLACE_WEIGHT + came)
            for expected, came, passed in zip(prior, self._came, self._passed, strict=True)
        ]

    def in_comparison(self) -> list[float]:
        """Return how many times as many get past each place as were to."""
        return [
            (_SHARED_WEIGHT + passed) / (_SHARED_WEIGHT + came)
            for came, passed in zip(self._came, self._passed, strict=True)
        ]

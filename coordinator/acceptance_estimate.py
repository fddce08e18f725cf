"""What becomes of a session's proposals, estimated online."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from coordinator.plan import Acceptance
from specd.settings import MAX_NUM_DRAFT_TOKENS

# Each round takes this much weight from those before it: text changes, and acceptance with it.
_DECAY = 1 / 64
# Each round without a proposal takes this much of what is known of the session alone: a run of bad luck that ended its
# proposals must not keep it from them, if others like it have them.
_FADING = 1 / 16

# Before anything is known: how likely a token is accepted if those before it are, and how many tokens' worth that is.
_FIRST_HAZARD = 0.8
_FIRST_WEIGHT = 4.0
# How many tokens' worth what is known of others counts: of all places for one, of all sessions for one.
_PLACE_WEIGHT = 4.0
_SHARED_WEIGHT = 16.0

_PLACES = range(MAX_NUM_DRAFT_TOKENS)


class AcceptanceEstimate:
    """Estimates, place by place, how often proposals go so far and how often they are accepted so far.

    What is estimated is the part that goes on, or is accepted, of those that did so up to the place before: each place
    leans on what is known of all places, and that on what `shared`, the estimate of many sessions, knows. So the first
    rounds of a session go by the sessions before it, and places that were never tried by the others.
    """

    def __init__(self, shared: AcceptanceEstimate | None = None) -> None:
        self._shared = shared
        self._reached = _Hazards()
        self._accepted = _Hazards()

    def observe(self, most: int, num_proposed: int, num_accepted: int) -> None:
        """Learn from a round that could have had `most` draft tokens."""
        self._reached.observe(most, num_proposed)
        self._accepted.observe(most, num_accepted)
        if self._shared is not None:
            self._shared.observe(most, num_proposed, num_accepted)

    def fade(self) -> None:
        """Count a round that could not have a proposal."""
        self._reached.fade()
        self._accepted.fade()

    def acceptance(self) -> Acceptance:
        """Return the estimate for proposals of any length."""
        reached, accepted = self._hazards()
        return Acceptance(list(accumulate(reached, mul)), list(accumulate(accepted, mul)))

    def _hazards(self) -> tuple[list[float], list[float]]:
        if self._shared is None:
            return self._reached.alone(first=1.0), self._accepted.alone(first=_FIRST_HAZARD)
        reached, accepted = self._shared._hazards()
        return self._reached.with_others(reached), self._accepted.with_others(accepted)


class _Hazards:
    """By place, how many came up to it, and how many of these got past it; decaying."""

    def __init__(self) -> None:
        self._came = [0.0] * len(_PLACES)
        self._passed = [0.0] * len(_PLACES)

    def observe(self, most: int, num_passed: int) -> None:
        for place in range(min(most, num_passed + 1)):
            self._came[place] += 1 - self._came[place] * _DECAY
            self._passed[place] += (place < num_passed) - self._passed[place] * _DECAY

    def fade(self) -> None:
        self._came = [weight * (1 - _FADING) for weight in self._came]
        self._passed = [weight * (1 - _FADING) for weight in self._passed]

    def alone(self, first: float) -> list[float]:
        """Return the part that gets past each place, of those that come to it, by what is known here."""
        overall = (_FIRST_WEIGHT * first + sum(self._passed)) / (_FIRST_WEIGHT + sum(self._came))
        return self._leaning_on([overall] * len(_PLACES))

    def with_others(self, others: Sequence[float]) -> list[float]:
        """Return it by what is known of others too, from which this may differ, at all places alike."""
        expected = sum(map(mul, self._came, others))
        tilt = (_SHARED_WEIGHT + sum(self._passed)) / (_SHARED_WEIGHT + expected)
        return self._leaning_on([min(other * tilt, 1.0) for other in others])

    def _leaning_on(self, prior: Sequence[float]) -> list[float]:
        return [
            (_PLACE_WEIGHT * expected + passed) / (_PLACE_WEIGHT + came)
            for expected, came, passed in zip(prior, self._came, self._passed, strict=True)
        ]

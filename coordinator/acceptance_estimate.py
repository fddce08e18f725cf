"""What becomes of a session's proposals, estimated online."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from coordinator.acceptance_levels import AcceptanceLevels, LevelBelief
from coordinator.plan import Acceptance
from specd.settings import MAX_NUM_DRAFT_TOKENS

# Each round takes this much weight from those before it: text changes, and acceptance with it.
_DECAY = 1 / 64
# Each round without a proposal takes this much of what is known of the session alone: a run of bad luck that ended its
# proposals must not keep it from them, if others like it have them.
_FADING = 1 / 16

# How many tokens' worth it is that proposals go as far as they may, before anything is known.
_FIRST_WEIGHT = 4.0
# How many tokens' worth what is known of others counts: of all places for one, of all sessions for one.
_PLACE_WEIGHT = 4.0
_SHARED_WEIGHT = 16.0
_LARGEST_HAZARD = 0.995

_PLACES = range(MAX_NUM_DRAFT_TOKENS)


class SharedAcceptance:
    """What is known of the proposals of all sessions that are alike."""

    def __init__(self) -> None:
        self.levels = AcceptanceLevels()
        self._reached = _Hazards()
        self._accepted = [0.0] * len(_PLACES)
        self._expected = [0.0] * len(_PLACES)

    def observe(self, most: int, num_proposed: int, num_accepted: int, expected: float) -> None:
        """Learn from a round that could have had `most` draft tokens, each of which was so likely to be accepted."""
        self._reached.observe(most, num_proposed)
        for place in range(min(most, num_accepted + 1)):
            self._expected[place] += expected - self._expected[place] * _DECAY
            self._accepted[place] += (place < num_accepted) - self._accepted[place] * _DECAY

    def reached(self) -> list[float]:
        """Return the part that goes on at each place."""
        return self._reached.alone()

    def accepted_by_place(self) -> list[float]:
        """Return how many times as often as expected of the session a token is accepted at each place."""
        return [
            (_SHARED_WEIGHT + accepted) / (_SHARED_WEIGHT + expected)
            for accepted, expected in zip(self._accepted, self._expected, strict=True)
        ]


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
        self._reached = _Hazards()
        self._accepted = _Hazards()

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

    def acceptance(self) -> Acceptance:
        """Return the estimate for proposals of any length."""
        reached = self._reached.with_others(self._shared.reached())
        hazard = self._level.hoped_for
        accepted = self._accepted.leaning_on(
            [min(hazard * times, _LARGEST_HAZARD) for times in self._shared.accepted_by_place()]
        )
        return Acceptance(list(accumulate(reached, mul)), list(accumulate(accepted, mul)))


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

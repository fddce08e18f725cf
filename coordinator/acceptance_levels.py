"""How much of a draft's tokens the target accepts in one session and in another: the levels of sessions."""

from __future__ import annotations

import math
from collections.abc import Sequence

# How likely a token is accepted if those before it are, at each level.
LEVELS = (0.02, 0.1, 0.25, 0.4, 0.55, 0.67, 0.77, 0.85, 0.91, 0.96, 0.99)
# How many sessions of each level there have been, before there were any, and how many could always be.
_FIRST = (0.2, 0.2, 0.2, 0.2, 0.4, 0.6, 0.8, 0.6, 0.4, 0.2, 0.2)
_ALWAYS = [count / 8 for count in _FIRST]
# Each session takes this much weight from those before it.
_DECAY = 1 / 24
# In each round a session becomes like any other with this probability: its text changes, and what ended its proposals
# was bad luck.
_CHANGE = 1 / 128
# How many standard deviations more than expected is hoped for: nobody is worse off for it but those few of whom nothing
# is known yet, and who is not given any drafts is not found out to be good.
_HOPE = 0.5


class AcceptanceLevels:
    """How many of the latest sessions were of which level.

    Sessions differ more than their rounds do: a draft that gets three of four tokens of one text gets none of another,
    which is too long for it. Their average is true of neither. So a session is likely what others were, of which each
    weighs the same however many rounds it took, and soon what it shows to be: an empirical Bayes estimate (Robbins,
    1956).
    """

    def __init__(self) -> None:
        self._counts = list(_FIRST)
        self._num_sessions = 0

    def prior(self) -> list[float]:
        """Return how likely each level is for a session of which nothing is known."""
        return _normalised([count + always for count, always in zip(self._counts, _ALWAYS, strict=True)])

    def begin(self) -> int:
        """Let those that were counted weigh less, because there is another; returns its number."""
        self._counts = [count * (1 - _DECAY) for count in self._counts]
        self._num_sessions += 1
        return self._num_sessions

    def count(self, number: int, now: Sequence[float], before: Sequence[float]) -> None:
        """Count the session of this number as what it now seems to be, in place of what it seemed before."""
        weight = (1 - _DECAY) ** (self._num_sessions - number)
        self._counts = [
            max(count + weight * (more - less), 0.0)
            for count, more, less in zip(self._counts, now, before, strict=True)
        ]


class LevelBelief:
    """How likely a session is of which level, by what became of its proposals.

    It is the forward probability of a hidden Markov model whose state is the level.
    """

    def __init__(self, levels: AcceptanceLevels) -> None:
        """`levels` are those of the sessions like it."""
        self._levels = levels
        self._belief: list[float] | None = None
        self._number: int | None = None
        self._counted_as = [0.0] * len(LEVELS)

    @property
    def expected(self) -> float:
        """How likely a token is accepted if those before it are."""
        return sum(probability * level for probability, level in zip(self._current, LEVELS, strict=True))

    @property
    def hoped_for(self) -> float:
        """How likely that may be, as far as it is not known better."""
        mean = self.expected
        variance = sum(
            probability * (level - mean) ** 2 for probability, level in zip(self._current, LEVELS, strict=True)
        )
        return mean + _HOPE * math.sqrt(variance)

    @property
    def _current(self) -> list[float]:
        return self._belief or self._levels.prior()

    def observe(self, num_accepted: int, *, is_cut: bool) -> None:
        """Learn that so many tokens of a proposal were accepted, and whether the next was not."""
        if self._number is None:
            self._number = self._levels.begin()
        seen = _normalised(
            [
                probability * level**num_accepted * (1 - level) ** is_cut
                for probability, level in zip(self._current, LEVELS, strict=True)
            ]
        )
        self._levels.count(self._number, seen, self._counted_as)
        self._counted_as = seen
        self._belief = seen
        self.fade()

    def fade(self) -> None:
        """Count a round in which it may have changed."""
        if self._belief is not None:
            prior = self._levels.prior()
            self._belief = [
                (1 - _CHANGE) * own + _CHANGE * of_all for own, of_all in zip(self._belief, prior, strict=True)
            ]


def _normalised(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]

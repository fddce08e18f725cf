"""Of which level a session is: how much of a draft's tokens the target accepts in it."""

from __future__ import annotations

import math

from coordinator.acceptance_levels import LEVELS, AcceptanceLevels, normalised

# In each round a session becomes like any other with this probability: its text changes, and what ended its proposals
# was bad luck.
_CHANGE = 1 / 128
# How many standard deviations more than expected is hoped for: nobody is worse off for it but those few of whom nothing
# is known yet, and who is not given any drafts is not found out to be good.
_HOPE = 0.5


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
        return _mean(self._current)

    @property
    def hoped_for(self) -> float:
        """How likely that may be, as far as it is not known better."""
        belief = self._current
        mean = _mean(belief)
        variance = sum(probability * (level - mean) ** 2 for probability, level in zip(belief, LEVELS, strict=True))
        return mean + _HOPE * math.sqrt(variance)

    @property
    def _current(self) -> list[float]:
        return self._belief or self._levels.prior()

    def observe(self, num_accepted: int, *, is_cut: bool) -> None:
        """Learn that so many tokens of a proposal were accepted, and whether the next was not."""
        if self._number is None:
            self._number = self._levels.begin()
        seen = normalised(
            [
                probability * level**num_accepted * (1 - level) ** is_cut
                for probability, level in zip(self._current, LEVELS, strict=True)
            ]
        )
        self._levels.count(self._number, seen, self._counted_as)
        self._belief = self._counted_as = seen
        self.fade()

    def fade(self) -> None:
        """Count a round in which it may have changed."""
        if self._belief is not None:
            prior = self._levels.prior()
            self._belief = [
                (1 - _CHANGE) * own + _CHANGE * of_all for own, of_all in zip(self._belief, prior, strict=True)
            ]


def _mean(belief: list[float]) -> float:
    return sum(probability * level for probability, level in zip(belief, LEVELS, strict=True))

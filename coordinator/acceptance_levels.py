"""How much of a draft's tokens the target accepts in one session and in another: the levels of sessions."""

from __future__ import annotations

from collections.abc import Sequence

# How likely a token is accepted if those before it are, at each level.
LEVELS = (0.02, 0.1, 0.25, 0.4, 0.55, 0.67, 0.77, 0.85, 0.91, 0.96, 0.99)
# How many sessions of each level there have been, before there were any, and how many could always be.
_FIRST = (0.2, 0.2, 0.2, 0.2, 0.4, 0.6, 0.8, 0.6, 0.4, 0.2, 0.2)
_ALWAYS = [count / 8 for count in _FIRST]
# Each session takes this much weight from those before it.
_DECAY = 1 / 24


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
        return normalised([count + always for count, always in zip(self._counts, _ALWAYS, strict=True)])

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


def normalised(weights: Sequence[float]) -> list[float]:
    """Return the weights as parts of their sum."""
    total = sum(weights)
    return [weight / total for weight in weights]

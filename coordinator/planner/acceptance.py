"""How far proposals get: how many of their tokens are accepted, and at which of them they end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add, mul, sub

# Positions that are told apart; later ones are as the last.
NUM_POSITIONS = 8
# Strength in tokens: of the mean of all positions for one, of the expected mean, and of other texts for a new one.
_PRIOR = 4.0
_DECAY = 1 / 128  # of a count for each new token
_FORGOTTEN = 0.03  # part of all counts, each time


class PassRates:
    """By position in proposals, decayed counts of tokens that were tried and that passed."""

    def __init__(self, expected: float, *, decay: float = _DECAY) -> None:
        """Expect this part of the tokens to pass, before any is seen. A count decays by `decay` for each new token."""
        self.expected, self._decay = expected, decay
        self.tried, self.passed = [0.0] * NUM_POSITIONS, [0.0] * NUM_POSITIONS

    def add(self, num_tried: int, num_passed: int) -> None:
        """Count the tokens that passed and the first that did not; those after it were not tried."""
        for i in range(min(num_tried, num_passed + 1)):
            position = min(i, NUM_POSITIONS - 1)
            self.tried[position] += 1 - self._decay * self.tried[position]
            self.passed[position] += (i < num_passed) - self._decay * self.passed[position]

    def __add__(self, other: PassRates) -> PassRates:
        return self._combined(add, other)

    def __sub__(self, other: PassRates) -> PassRates:
        return self._combined(sub, other)

    def _combined(self, combine: Callable[[float, float], float], other: PassRates) -> PassRates:
        own = PassRates(self.expected, decay=self._decay)
        own.tried, own.passed = [*map(combine, self.tried, other.tried)], [*map(combine, self.passed, other.passed)]
        return own

    def begun(self) -> PassRates:
        """Return the counts of a new text: its own tokens soon weigh more than all that other texts taught."""
        own = PassRates(self.mean())
        parts = [min(1.0, _PRIOR / n) if n else 0.0 for n in self.tried]
        own.tried, own.passed = ([*map(mul, parts, each)] for each in (self.tried, self.passed))
        return own

    def forget(self) -> None:
        """Let counts decay, so that tokens that failed at first and were not tried since get another chance."""
        self.tried, self.passed = ([(1 - _FORGOTTEN) * n for n in each] for each in (self.tried, self.passed))

    def survival(self, k: int) -> list[float]:
        """Return the probability that tokens 0 to i all pass, for each i < k."""
        mean = self.mean()
        rates = [(_PRIOR * mean + passed) / (_PRIOR + n) for passed, n in zip(self.passed, self.tried, strict=True)]
        return list(accumulate((*rates, *rates[-1:] * (k - NUM_POSITIONS)), mul))[:k]

    def mean(self) -> float:
        """Return the part of all positions' tokens that passes."""
        return (_PRIOR * self.expected + sum(self.passed)) / (_PRIOR + sum(self.tried))

    @classmethod
    def restored(cls, expected: float, tried: list[float], passed: list[float]) -> PassRates:
        """Return what had these counts. Raises ValueError for counts that cannot be."""
        own = cls(expected)
        own.tried, own.passed = [*map(float, tried)], [*map(float, passed)]
        if not (len(own.tried) == len(own.passed) == NUM_POSITIONS and 0 <= expected <= 1):
            raise ValueError(f"counts {tried} and {passed} of positions")
        if not all(0 <= p <= n <= 1 / _DECAY for p, n in zip(own.passed, own.tried, strict=True)):
            raise ValueError(f"of {tried} tokens, {passed} passed")
        return own


@dataclass(frozen=True)
class Proposals:
    """The acceptance of proposals, and their lengths before they end early."""

    accepted: PassRates
    proposed: PassRates

    def add(self, limit: int, num_accepted: int, num_proposed: int) -> None:
        """Count a proposal that could have had `limit` tokens."""
        self.accepted.add(limit, num_accepted)
        self.proposed.add(limit, num_proposed)

    def expect(self, others: Proposals) -> None:
        """Expect what is not known of these proposals from the mean of others."""
        self.accepted.expected, self.proposed.expected = others.accepted.mean(), others.proposed.mean()

    def begun(self) -> Proposals:
        """Return those of a new text."""
        return Proposals(self.accepted.begun(), self.proposed.begun())


def mean_seconds(costs: Sequence[float], proposed: Sequence[float]) -> list[float]:
    """Return by limit k the mean seconds of a round, whose proposal may end before k tokens.

    A round with i draft tokens takes `costs[i]`. `proposed[i]` is the probability that a proposal has more than i. This
    is the mean over their lengths, because the cost of a verify is not linear in its length.
    """
    seconds, ended_early = [costs[0]], 0.0
    for k, (before, now) in enumerate(pairwise((1.0, *proposed)), start=1):
        ended_early += (before - now) * costs[k - 1]
        seconds.append(ended_early + now * costs[k])
    return seconds

"""Acceptance by draft position, estimated online."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from specd.settings import MAX_NUM_DRAFT_TOKENS

# Mean acceptance of a token in a session, before any session has ended, and the weight of the latest one that has.
_FIRST_LEVEL = 0.7
_LEVEL_WEIGHT = 0.125
# Strength of a prior in tokens: of other sessions for one session, and of its mean for one of its positions.
_SESSION_PRIOR = 4.0
_POSITION_PRIOR = 16.0
_LARGEST_ACCEPTANCE = 0.995
# Weight of the latest round in all counts.
_DECAY = 1 / 64


class PositionCounts:
    """By draft position, decayed counts of tokens that passed and of those that were expected to."""

    def __init__(self) -> None:
        self.passed = [0.0] * MAX_NUM_DRAFT_TOKENS
        self.expected = [0.0] * MAX_NUM_DRAFT_TOKENS

    def add(self, num_tried: int, num_passed: int, expected: Sequence[float]) -> None:
        """Count a proposal that tried `num_tried` positions and passed the first `num_passed` of them.

        `expected[i]` is the predicted probability of passing position i, for a token that gets there.
        """
        for i in range(min(num_tried, num_passed + 1)):
            self.passed[i] += (i < num_passed) - _DECAY * self.passed[i]
            self.expected[i] += expected[i] - _DECAY * self.expected[i]

    def ratios(self, prior: float = 1.0) -> list[float]:
        """Return the ratio of observed to expected passes by position, shrunk to a prior."""
        return [
            (_POSITION_PRIOR * prior + passed) / (_POSITION_PRIOR + expected)
            for passed, expected in zip(self.passed, self.expected, strict=True)
        ]

    def survival(self) -> list[float]:
        """Return the part that passes each position and all before it, where all were expected to."""
        return list(accumulate((min(ratio, 1.0) for ratio in self.ratios()), mul))


class PooledAcceptance:
    """What all sessions of one kind of sampling have shown.

    Sessions differ more than their rounds do: a draft that suits one text may not suit the next. So the level is a mean
    over sessions, however many rounds each has; the shape by position is one over rounds.
    """

    def __init__(self) -> None:
        self.level = _FIRST_LEVEL
        self.shape = PositionCounts()
        # Where proposals end early: all of them, and those whose earlier tokens are all accepted, which do less often.
        self.reached = PositionCounts()
        self.continued = PositionCounts()
        # acceptance = confidence ** exponent, learnt online: drafts differ in how sure they are of themselves.
        self.exponent = 1.0

    def rates(self) -> list[float]:
        """Return P(token i accepted | tokens < i accepted) for a session of which nothing is known."""
        return [min(self.level * ratio, _LARGEST_ACCEPTANCE) for ratio in self.shape.ratios()]

    def confidence(self, acceptance: float) -> float:
        """Return the confidence that stands for a probability of acceptance."""
        return float(acceptance ** (1 / self.exponent))

    def add_confidences(self, confidences: Sequence[float], num_accepted: int) -> None:
        """Learn what confidences stand for."""
        judged = confidences[: num_accepted + 1]
        surplus = sum(confidence**self.exponent for confidence in judged) - min(num_accepted, len(judged))
        self.exponent = min(max(self.exponent * math.exp(0.05 * surplus), 0.05), 4.0)

    def add_session(self, num_tried: float, num_accepted: float) -> None:
        """Learn the level of a session that has ended."""
        if num_tried:
            weight = _LEVEL_WEIGHT * min(num_tried / _POSITION_PRIOR, 1.0)
            self.level += weight * (num_accepted / num_tried - self.level)


class SessionAcceptance:
    """Acceptance of one session's proposals, from its own rounds and from sessions like it.

    The first rounds go by the pool. Soon the session's own ratio of observed to expected acceptances scales the pooled
    rates, by position too: shrinkage to a pooled mean (Efron and Morris, 1975).
    """

    def __init__(self, pool: PooledAcceptance, *, teaches: bool = True) -> None:
        """Share `pool`; without `teaches`, read it and leave it as it is."""
        self._pool = pool
        self._teaches = teaches
        self._own = PositionCounts()
        self._num_tried = self._num_accepted = 0

    def add(self, k: int, confidences: Sequence[float], num_proposed: int, num_accepted: int) -> None:
        """Learn from a proposal of `num_proposed` tokens that could have had k."""
        pooled = self._pool.rates()
        self._num_tried += min(num_accepted + 1, num_proposed)
        self._num_accepted += num_accepted
        if self._teaches:
            level = self._pool.level * self._ratio(pooled)
            self._pool.shape.add(num_proposed, num_accepted, [min(level, 1.0)] * num_proposed)
            self._pool.reached.add(k, num_proposed, [1.0] * k)
            self._pool.continued.add(min(k, num_accepted + 1), num_proposed, [1.0] * k)
            self._pool.add_confidences(confidences, num_accepted)
        self._own.add(num_proposed, num_accepted, pooled)

    def close(self) -> None:
        """End with the session."""
        if self._teaches:
            self._pool.add_session(self._num_tried, self._num_accepted)

    def accepted(self) -> list[float]:
        """Return the probability that the first i + 1 tokens are all accepted, for each position i."""
        pooled = self._pool.rates()
        ratios = self._own.ratios(self._ratio(pooled))
        return list(accumulate((min(p * r, _LARGEST_ACCEPTANCE) for p, r in zip(pooled, ratios, strict=True)), mul))

    def _ratio(self, pooled: Sequence[float]) -> float:
        """Return the ratio of observed to expected acceptances of the session, at most as large as can be."""
        ratio = (_SESSION_PRIOR + sum(self._own.passed)) / (_SESSION_PRIOR + sum(self._own.expected))
        return min(ratio, 1 / max(pooled[0], 0.01))

"""What a draft's confidence in its tokens says about their acceptance, learnt online."""

from __future__ import annotations

import math
from collections.abc import Sequence


class ConfidenceScale:
    """How the draft's confidence in a token relates to its acceptance: acceptance = confidence ** exponent.

    How good a guess confidence itself is differs from draft to draft; the exponent follows the tokens that the target
    judged.
    """

    _STEP = 0.05

    def __init__(self) -> None:
        self._exponent = 1.0

    def observe(self, confidences: Sequence[float], num_accepted: int) -> None:
        """Learn from a proposal whose tokens had these confidences."""
        judged = confidences[: num_accepted + 1]
        expected = sum(confidence**self._exponent for confidence in judged)
        exponent = self._exponent * math.exp(self._STEP * (expected - min(num_accepted, len(judged))))
        self._exponent = min(max(exponent, 0.05), 4.0)

    def confidence(self, acceptance: float) -> float:
        """Return the confidence that stands for a probability of acceptance."""
        return float(acceptance ** (1 / self._exponent))

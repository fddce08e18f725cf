"""Log-probabilities as JSON can have them."""

from __future__ import annotations

_LOWEST = -9999.0  # for a probability of 0, whose logarithm JSON has no number for; OpenAI's own


def at_least(log_probability: float) -> float:
    """Return a log-probability that JSON can have."""
    return max(log_probability, _LOWEST)

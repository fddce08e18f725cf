"""Log-probabilities, and the tokens that they are of, as JSON can have them."""

from __future__ import annotations

_LOWEST = -9999.0  # for a probability of 0, whose logarithm JSON has no number for; OpenAI's own


def at_least(log_probability: float) -> float:
    """Return a log-probability that JSON can have."""
    return max(log_probability, _LOWEST)


def name_of(own: bytes, *, prefix: str = "") -> str:
    r"""Return the text of a token; of one with a part of a character its bytes as OpenAI writes them, `\xf0\x9f`."""
    try:
        return own.decode()
    except UnicodeDecodeError:
        return prefix + repr(own)[2:-1]

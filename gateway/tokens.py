"""Tokens, their log-probabilities and the end of a generation, as OpenAI's API has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specd.client.events import CompletionToken, Delta
from specd.vocabulary import FinishReason

_LOWEST = -9999.0  # for a probability of 0, whose logarithm JSON has no number for; OpenAI's own


def at_least(log_probability: float) -> float:
    """Return a log-probability that JSON can have."""
    return max(log_probability, _LOWEST)


def name_of(own: bytes, *, prefix: str = "") -> str:
    r"""Return the text of a token, or its bytes as OpenAI writes them, `\xf0\x9f`, where it splits a character."""
    try:
        return own.decode()
    except UnicodeDecodeError:
        return prefix + repr(own)[2:-1]


def sources_of(tokens: Sequence[CompletionToken]) -> list[dict[str, Any]]:
    """Return tokens as `token_sources` shows them."""
    return [_with_source(token) for token in tokens]


def _with_source(token: CompletionToken) -> dict[str, Any]:
    shown = {"id": token.id, "text": token.text, "source": token.source.value}
    return {**shown, "near_tie": True, "margin": token.margin} if token.near_tie else shown


def round_of(delta: Delta) -> dict[str, int]:
    """Return how many tokens were proposed and accepted, as `token_sources` shows it in streams."""
    return {"proposed": delta.round.proposed, "accepted": delta.round.accepted}


def finish_reason_of(delta: Delta) -> str:
    """Return OpenAI's finish reason, `stop` or `length`; empty before the end."""
    if delta.finished is None:
        return ""
    return "length" if delta.finished.reason is FinishReason.LENGTH else "stop"

"""Log-probabilities of a chat completion's tokens, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.generation import TextToken
from gateway.log_probability import at_least, name_of


def content_of(tokens: Sequence[TextToken]) -> dict[str, Any]:
    """Return the `logprobs` of tokens: those that the model itself gave them, before temperature and penalties."""
    return {"content": [_entry(token) for token in tokens], "refusal": None}


def _entry(token: TextToken) -> dict[str, Any]:
    top = [_ranked(ranked.own, ranked.log_probability) for ranked in token.top]
    return {**_ranked(token.own, token.log_probability or 0.0), "top_logprobs": top}


def _ranked(own: bytes, log_probability: float) -> dict[str, Any]:
    return {"token": name_of(own), "logprob": at_least(log_probability), "bytes": list(own)}

"""Log-probabilities of a chat completion's tokens, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.tokens import at_least, name_of
from specd.client import CompletionToken


def content_of(tokens: Sequence[CompletionToken]) -> dict[str, Any]:
    """Return the `logprobs` of tokens: those that the model itself gave them, before temperature and penalties."""
    return {"content": [_entry(token) for token in tokens], "refusal": None}


def _entry(token: CompletionToken) -> dict[str, Any]:
    values = token.log_probabilities
    assert values is not None
    top = [_ranked(ranked.own_bytes, ranked.log_probability) for ranked in values.top_model]
    return {**_ranked(token.own_bytes, values.model), "top_logprobs": top}


def _ranked(own: bytes, log_probability: float) -> dict[str, Any]:
    return {"token": name_of(own), "logprob": at_least(log_probability), "bytes": list(own)}

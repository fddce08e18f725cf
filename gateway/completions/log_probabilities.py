"""Log-probabilities of a completion's tokens, in OpenAI's legacy form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.tokens import at_least, name_of
from specd.client import CompletionToken


def lists_of(tokens: Sequence[CompletionToken], offset: int) -> dict[str, Any]:
    r"""Return the `logprobs` of tokens whose text begins at `offset`: lists by token, the most likely ones by name.

    A token's own text is its name, special ones included; `bytes:\xf0\x9f` if it has a part of a character. The offsets
    are those of the text that each token completes. A prompt's first token has no log-probability.
    """
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [_name(token.own_bytes) for token in tokens],
        "token_logprobs": [None if (p := token.log_probabilities) is None else at_least(p.model) for token in tokens],
        "top_logprobs": [_most_likely(token) for token in tokens],
        "text_offset": offsets,
    }


def _most_likely(token: CompletionToken) -> dict[str, float] | None:
    """Return the most likely tokens in the place of one, and it, which may not be one of them.

    Several tokens can have one text: the others are named by their ids, as vLLM can name all.
    """
    if token.log_probabilities is None:
        return None
    top = token.log_probabilities.top_model
    values = {ranked.token_id: ranked.log_probability for ranked in top}
    values.setdefault(token.id, token.log_probabilities.model)
    names = {_name(token.own_bytes): token.id}
    for ranked in top:
        names.setdefault(_name(ranked.own_bytes), ranked.token_id)
    name_by_id = {token_id: name for name, token_id in names.items()}
    return {name_by_id.get(token_id, f"token_id:{token_id}"): at_least(value) for token_id, value in values.items()}


def _name(own: bytes) -> str:
    return name_of(own, prefix="bytes:")

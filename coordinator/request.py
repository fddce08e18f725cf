"""What a client may ask for."""

from __future__ import annotations

from collections.abc import Sequence

from specd.errors import InvalidRequestError
from specd.model_info import ModelInfo
from specd.settings import MAX_NUM_DRAFT_TOKENS

# Tokens that are generated when a request does not say.
DEFAULT_MAX_TOKENS = 256


def check_num_draft_tokens(num_draft_tokens: int) -> None:
    """Raise InvalidRequestError if a round cannot have so many draft tokens."""
    if num_draft_tokens > MAX_NUM_DRAFT_TOKENS:
        raise InvalidRequestError(
            "OUT_OF_RANGE", f"num_draft_tokens is {num_draft_tokens}: it must be in [0, {MAX_NUM_DRAFT_TOKENS}]"
        )


def check_prompt(model: ModelInfo, prompt_ids: Sequence[int]) -> None:
    """Raise InvalidRequestError if the target cannot continue these tokens."""
    if not prompt_ids:
        raise InvalidRequestError("EMPTY_PROMPT", "the prompt is empty: set `text` or `token_ids`")
    if max(prompt_ids) >= model.vocabulary_size:
        raise InvalidRequestError(
            "TOKEN_OUT_OF_VOCABULARY",
            f"token_ids has {max(prompt_ids)}, but the vocabulary of {model.name} ends at {model.vocabulary_size - 1}",
        )
    if len(prompt_ids) >= model.context_length:
        raise InvalidRequestError(
            "CONTEXT_EXCEEDED",
            f"the prompt has {len(prompt_ids)} tokens, which leaves no room to generate: "
            f"the context of {model.name} is {model.context_length} tokens",
        )


def resolve_max_tokens(model: ModelInfo, prompt_len: int, max_tokens: int | None) -> int:
    """Return how many tokens to generate at most. Raises InvalidRequestError if the context has no room for them."""
    room = model.context_length - prompt_len
    if max_tokens is None:
        return min(DEFAULT_MAX_TOKENS, room)
    if max_tokens == 0:
        raise InvalidRequestError("OUT_OF_RANGE", "max_tokens is 0: it must be at least 1")
    if max_tokens > room:
        raise InvalidRequestError(
            "CONTEXT_EXCEEDED",
            f"the prompt's {prompt_len} tokens and max_tokens {max_tokens} make {prompt_len + max_tokens}, "
            f"but the context of {model.name} is {model.context_length} tokens: max_tokens can be at most {room}",
        )
    return max_tokens

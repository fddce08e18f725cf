"""Fields of OpenAI and vLLM that have no effect here: the default values of clients, and values that are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.http.errors import ApiError, invalid

# These fields change the text, so values other than the neutral ones are refused.
_CHANGING: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prompt_embeds": ([],),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
# These fields do not change the text, so values other than the neutral ones are named as ignored.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "include": ([],),
    "include_reasoning": (True,),
    "metadata": ({},),
    "parallel_tool_calls": (True,),
    "priority": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True, False),  # special tokens are not shown
    "store": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


def ignored_in(extra: Mapping[str, Any], changing: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Return the names of unknown fields with values that are not neutral, which are ignored.

    `changing` has more fields that change the text, by name with their neutral values; null is neutral for every field.
    Raises ApiError for a field that would change the text.
    """
    known = {**_CHANGING, **changing}
    ignored = []
    for name, value in extra.items():
        if value is None or _is_one_of(value, known.get(name, _HARMLESS.get(name, ()))):
            continue
        if name in known:
            raise _refusal(name, known[name])
        ignored.append(name)
    return sorted(ignored)


def _is_one_of(value: Any, neutral: Sequence[Any]) -> bool:
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)


def _refusal(name: str, neutral: Sequence[Any]) -> ApiError:
    others = " or ".join(map(repr, neutral))
    what = f"leave it out, or send {others}" if others else "leave it out"
    return invalid(f"{name} is not supported: {what}", name, "unsupported_parameter")

"""How much a model is to reason: OpenAI's levels and Anthropic's `thinking`, as variables of its chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from gateway.generation import RequestedGeneration
from specd.text.chat import Chat

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def with_effort(
    generation: RequestedGeneration, effort: Effort | None, chat_template: str
) -> tuple[RequestedGeneration, bool]:
    """Return the generation of a conversation with an effort, and whether the template reads it.

    As in vLLM, `reasoning_effort` is the level itself, and `enable_thinking` is false for `none` and else true. What
    the request sets in `chat_template_kwargs` stays.
    """
    if effort is None:
        return generation, True
    return _with_arguments(generation, {"reasoning_effort": effort, "enable_thinking": effort != "none"}, chat_template)


def with_thinking(
    generation: RequestedGeneration, thinks: bool | None, chat_template: str
) -> tuple[RequestedGeneration, bool]:
    """Return the generation of a conversation with or without reasoning, and whether the template reads that.

    What the request sets in `chat_template_kwargs` stays.
    """
    if thinks is None:
        return generation, True
    return _with_arguments(generation, {"enable_thinking": thinks}, chat_template)


def _with_arguments(
    generation: RequestedGeneration, arguments: Mapping[str, Any], chat_template: str
) -> tuple[RequestedGeneration, bool]:
    """Return the generation with those arguments that the template reads, and whether it reads any."""
    read = {name: value for name, value in arguments.items() if re.search(rf"\b{name}\b", chat_template)}
    prompt = generation.prompt
    assert isinstance(prompt, Chat)
    prompt = replace(prompt, template_arguments={**read, **prompt.template_arguments})
    return replace(generation, prompt=prompt), bool(read)

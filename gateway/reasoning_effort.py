"""How much a model is to reason: OpenAI's levels, as variables of its chat template."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

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
    arguments = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    read = {name: value for name, value in arguments.items() if re.search(rf"\b{name}\b", chat_template)}
    prompt = generation.prompt
    assert isinstance(prompt, Chat)
    return replace(generation, prompt=replace(prompt, template_arguments={**read, **prompt.template_arguments})), bool(
        read
    )

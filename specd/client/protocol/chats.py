"""Conversations, as clients write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from specd.errors import InvalidRequestError
from specd.text.chat import Chat

# A message of the user, or messages with `role`, `content` and whatever else the template reads.
Messages = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]


def is_chat(prompt: str | Sequence[int] | Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> bool:
    """Say whether a prompt is messages, and not a text or token ids."""
    return isinstance(prompt, Mapping) or (
        not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)
    )


def chat_of(
    messages: Messages,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    template_arguments: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
) -> Chat:
    """Return the conversation, or what is new in one."""
    if isinstance(messages, str):
        messages = {"role": "user", "content": messages}
    if isinstance(messages, Mapping):
        messages = [messages]
    return Chat(tuple(messages), tuple(tools), dict(template_arguments or {}), continue_final_message)


def prompt_of(
    prompt: str | Sequence[int] | Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    template_arguments: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
) -> str | Sequence[int] | Chat:
    """Return a text, token ids or a conversation. Raises InvalidRequestError for tools beside a text."""
    asked: Any = prompt
    if is_chat(prompt):
        return chat_of(
            asked,
            tools=tools,
            template_arguments=template_arguments,
            continue_final_message=continue_final_message,
        )
    if tools or template_arguments:
        raise InvalidRequestError("CONTRADICTION", "tools and template_arguments are for messages, not for a text")
    return cast(str | Sequence[int], asked)

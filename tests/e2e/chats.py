"""Messages, and the chats that are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf import struct_pb2

from specd.v1.generation_pb2 import Chat, ChatMessage

QUESTION = {"role": "user", "content": "def add(a, b):"}
SYSTEM = {"role": "system", "content": "Write code."}
REPLY = {"role": "assistant", "content": "    return"}
TOOL = {"type": "function", "function": {"name": "run"}}


def struct(values: dict[str, Any]) -> struct_pb2.Struct:
    message = struct_pb2.Struct()
    message.update(values)
    return message


def chat_of(
    messages: list[dict[str, Any]],
    tools: Sequence[dict[str, Any]] = (),
    template_arguments: dict[str, Any] | None = None,
    continue_final_message: bool = False,
) -> Chat:
    return Chat(
        messages=[
            ChatMessage(
                role=message["role"],
                content=message["content"],
                fields=struct({name: value for name, value in message.items() if name not in {"role", "content"}}),
            )
            for message in messages
        ],
        tools=map(struct, tools),
        template_arguments=struct(template_arguments or {}),
        continue_final_message=continue_final_message,
    )

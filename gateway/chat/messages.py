"""Messages of a conversation, from OpenAI's form to that of chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.fields import Array, JsonObject, StrictModel
from gateway.http.errors import ApiError, invalid
from gateway.http.json_body import TOO_MANY_VALUES, new_room, parse_object
from specd.json_text import Room
from specd.sampling import MAX_CHAT_VALUES
from specd.text.chat import MAX_ROLE_CHARACTERS, Chat

MAX_MESSAGES = 4096
_MAX_CONTENT_PARTS = 4096
_MAX_CALLS = 128


class ContentPart(StrictModel):
    """A part of a message's content; only text can be read."""

    type: str
    text: str | None = None


Contents = str | Annotated[Array[ContentPart], Field(max_length=_MAX_CONTENT_PARTS)]


class CalledFunction(StrictModel):
    """What a tool call calls, with its arguments as JSON."""

    name: str
    arguments: str | JsonObject | None = None


class CallMessage(StrictModel):
    """A tool call of the assistant's."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class Message(StrictModel):
    """A message."""

    role: Annotated[str, Field(min_length=1, max_length=MAX_ROLE_CHARACTERS)]
    content: Contents | None = None
    tool_calls: Annotated[Array[CallMessage], Field(max_length=_MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


def checked_chat(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    template_arguments: Mapping[str, Any],
    *,
    continue_final_message: bool = False,
) -> Chat:
    """Return the conversation. Raises ApiError for more values than a conversation may have."""
    values: list[Any] = [*messages, *tools, template_arguments]
    num_values = 0
    while values:
        value = values.pop()
        parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        values += parts
        num_values += len(parts)
        if num_values > MAX_CHAT_VALUES:
            raise invalid(
                f"messages, tools and template arguments have more than {MAX_CHAT_VALUES} values: send fewer",
                code="too_many_values",
            )
    return Chat(tuple(messages), tuple(tools), template_arguments, continue_final_message)


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages as templates read them. Raises ApiError for what is no text."""
    room = new_room()  # for the arguments of all calls together
    return [_template_message(message, f"messages[{i}]", room) for i, message in enumerate(messages)]


def _template_message(message: Message, place: str, room: Room) -> dict[str, Any]:
    # OpenAI's newer name of the same.
    role = "system" if message.role == "developer" else message.role
    values: dict[str, Any] = {"role": role, "content": text_of(message.content, f"{place}.content")}
    for name in ("tool_call_id", "name", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            values[name] = value
    if message.tool_calls:
        values["tool_calls"] = [_tool_call(call, room) for call in message.tool_calls]
    return values


def text_of(content: str | Sequence[ContentPart] | None, place: str) -> str:
    """Return the text of a content. Raises ApiError for images and the like, which the model cannot read."""
    if content is None or isinstance(content, str):
        return content or ""
    for i, part in enumerate(content):
        if part.type not in {"text", "input_text", "output_text", "refusal"} or part.text is None:
            raise invalid(
                f"{place}[{i}] is of type {part.type[:100]!r}: this model reads text",
                f"{place}[{i}]",
                "unsupported_content",
            )
    return "".join(part.text or "" for part in content)


def _tool_call(call: CallMessage, room: Room) -> dict[str, Any]:
    arguments: str | Mapping[str, Any] = call.function.arguments or "{}"
    if isinstance(arguments, str):
        # Templates write them out themselves, from an object.
        try:
            arguments = parse_object(arguments.encode() or b"{}", room)
        except ApiError as error:
            if error.code == TOO_MANY_VALUES:
                raise
    return {"id": call.id or "", "type": "function", "function": {"name": call.function.name, "arguments": arguments}}

"""Conversations of clients, from messages of the protocol."""

from __future__ import annotations

from typing import Any, TypeVar

from specd.errors import InvalidRequestError
from specd.json_text import InvalidJsonError, Room, TooLargeJsonError, parse_json
from specd.sampling import MAX_CHAT_VALUES, check_count
from specd.text.chat import MAX_ROLE_CHARACTERS, Chat, plain
from specd.v1 import generation_pb2

MAX_ENTRIES = 4096  # messages, and tools
MAX_DEPTH = 64
# Keys are strings too. The gateway takes half as many in a body, and as many again in the arguments of its tool calls.
MAX_PARTS = 2**17

ValueT = TypeVar("ValueT", dict[str, Any], list[Any])


def chat_from(message: generation_pb2.Chat) -> Chat:
    """Return the conversation in a message. Raises InvalidRequestError, with the place of what is wrong.

    It takes time by the length of the message: read a long one beside the event loop.
    """
    room = Room(values=MAX_CHAT_VALUES, parts=MAX_PARTS, depth=MAX_DEPTH)  # for all texts together
    try:
        return Chat(
            messages=tuple(
                _message_from(each, f"chat.messages[{number}]", room) for number, each in enumerate(message.messages)
            ),
            tools=_tools_from(message, room),
            template_arguments=_object_from(message, "template_arguments", "chat", room),
            continue_final_message=message.continue_final_message,
            special_tokens={
                number: tuple((token.position, token.id) for token in each.special_tokens)
                for number, each in enumerate(message.messages)
                if each.special_tokens
            },
        )
    except ValueError as error:
        raise InvalidRequestError(
            "BROKEN_MESSAGE", "the conversation has a google.protobuf.Value of no kind"
        ) from error


def _message_from(message: generation_pb2.ChatMessage, place: str, room: Room) -> dict[str, Any]:
    if len(message.role) > MAX_ROLE_CHARACTERS:
        raise InvalidRequestError(
            "OUT_OF_RANGE",
            f"{place}.role has {len(message.role)} characters: send at most {MAX_ROLE_CHARACTERS}, such as 'user'",
        )
    fields = _object_from(message, "fields", place, room)
    own = {"role": message.role, "content": message.content}
    if message.fields_json and (twice := sorted(own.keys() & fields.keys())):
        name = twice[0]
        raise InvalidRequestError("CONTRADICTION", f"{place}.fields_json has `{name}`: set {place}.{name} alone")
    return {**own, **fields, **own}


def _tools_from(message: generation_pb2.Chat, room: Room) -> tuple[dict[str, Any], ...]:
    if not message.tools_json:
        return tuple(plain(tool) for tool in message.tools)
    if message.tools:
        raise _both("chat", "tools")
    tools = _parsed(message.tools_json.encode(), list, "chat.tools_json", room)
    check_count("chat.tools_json", len(tools), MAX_ENTRIES)
    for number, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise _wrong_type(f"chat.tools_json[{number}]", tool, "object")
    return tuple(tools)


def _object_from(message: Any, name: str, place: str, room: Room) -> dict[str, Any]:
    """Return the value of a Struct field, or of the field of JSON text beside it."""
    if not getattr(message, f"{name}_json"):
        values: dict[str, Any] = plain(getattr(message, name))
        return values
    if message.HasField(name):
        raise _both(place, name)
    return _parsed(getattr(message, f"{name}_json").encode(), dict, f"{place}.{name}_json", room)


def _parsed(text: bytes, kind: type[ValueT], place: str, room: Room) -> ValueT:
    """Return the value of JSON text, which comes as bytes so that the field's string is free while they are parsed."""
    try:
        value = parse_json(text, room)
    except InvalidJsonError as error:
        raise InvalidRequestError("BROKEN_MESSAGE", f"{place} {error}") from error
    except TooLargeJsonError as error:
        raise InvalidRequestError("OUT_OF_RANGE", f"{place}, with all before it, {error}: send fewer") from error
    if not isinstance(value, kind):
        raise _wrong_type(place, value, "object" if kind is dict else "array of objects")
    return value


def _wrong_type(place: str, value: Any, wanted: str) -> InvalidRequestError:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return InvalidRequestError(
        "BROKEN_MESSAGE", f"{place} is {names.get(type(value), 'a number')}: it must be a JSON {wanted}"
    )


def _both(place: str, name: str) -> InvalidRequestError:
    return InvalidRequestError(
        "CONTRADICTION",
        f"{place} has both {name} and {name}_json: set {name}_json alone, it keeps order and numbers",
    )

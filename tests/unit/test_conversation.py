"""Conversations in messages of the protocol: as the client wrote them, or refused with the place of what is wrong."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
from google.protobuf import struct_pb2
from hypothesis import given
from hypothesis import strategies as st

from coordinator.conversation import MAX_DEPTH, MAX_ENTRIES, MAX_PARTS, chat_from
from specd.client.options import GenerationOptions
from specd.client.protocol.wire import to_request
from specd.errors import InvalidRequestError
from specd.sampling import MAX_CHAT_VALUES
from specd.text.chat import Chat
from specd.v1.generation_pb2 import Chat as ChatBuffer
from specd.v1.generation_pb2 import ChatMessage, GenerateRequest, PlacedToken
from tests.security.hostile_shapes import BYTES, UNREAD_SHAPES, WRITTEN_SHAPES

QUESTION = {"role": "user", "content": "x"}
SAID = ChatMessage(role="user", content="x")
ARGUMENTS = {"pattern": "def", "include": "*.py", "channel": 1234567890123456789, "ratio": 2.0, "small": -0.0}

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**300), 10**300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(max_size=5), values, max_size=3)
fields = st.dictionaries(st.text(max_size=5).filter(lambda name: name not in {"role", "content"}), values, max_size=3)


def sent(chat: Chat) -> GenerateRequest:
    return GenerateRequest.FromString(to_request(chat, GenerationOptions()).SerializeToString())


def refusal(chat: ChatBuffer) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        chat_from(chat)
    return caught.value


def test_order_and_numbers_of_a_conversation_stay() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "grep", "arguments": ARGUMENTS}}
    messages = (QUESTION, {"role": "assistant", "content": "", "tool_calls": [call], "name": "a"})
    chat = Chat(messages, ({"type": "function", "b": 1, "a": 2.0},), {"z": ARGUMENTS, "a": [2.0, 2]})
    received = chat_from(sent(chat).chat)
    assert json.dumps((received.messages, received.tools, received.template_arguments)) == json.dumps(
        (chat.messages, chat.tools, chat.template_arguments)
    )


@given(fields, st.lists(objects, max_size=2), objects)
def test_what_a_client_sends_is_what_the_coordinator_has(
    more: dict[str, Any], tools: list[dict[str, Any]], arguments: dict[str, Any]
) -> None:
    chat = Chat(({**QUESTION, **more},), tuple(tools), arguments)
    received = chat_from(sent(chat).chat)
    assert json.dumps([received.messages, received.tools, received.template_arguments]) == json.dumps(
        [chat.messages, chat.tools, chat.template_arguments]
    )


def test_structs_still_do() -> None:
    struct = struct_pb2.Struct()
    struct.update({"b": 2.0, "a": "y", "role": "other"})
    chat = chat_from(ChatBuffer(messages=[ChatMessage(role="user", content="x", fields=struct)], tools=[struct]))
    assert json.dumps(chat.messages) == '[{"role": "user", "content": "x", "a": "y", "b": 2}]'
    assert json.dumps(chat.tools) == '[{"a": "y", "b": 2, "role": "other"}]'


def test_the_largest_whole_numbers_stay() -> None:
    largest = int(sys.float_info.max)
    chat = chat_from(ChatBuffer(template_arguments_json=f'{{"a": [{largest}, {-largest}]}}'))
    assert chat.template_arguments == {"a": [largest, -largest]}


def test_special_tokens_are_those_of_their_message() -> None:
    placed = ChatMessage(role="assistant", content="ab", special_tokens=[PlacedToken(id=7, position=1)])
    assert chat_from(ChatBuffer(messages=[SAID, placed])).special_tokens == {1: ((1, 7),)}


@pytest.mark.parametrize(
    ("chat", "reason", "message"),
    [
        (ChatBuffer(tools_json="[{}", messages=[SAID]), "BROKEN_MESSAGE", "chat.tools_json is not JSON: EOF while"),
        (
            ChatBuffer(tools_json="[] []"),
            "BROKEN_MESSAGE",
            "chat.tools_json is not JSON: trailing characters at line 1",
        ),
        (ChatBuffer(tools_json=" "), "BROKEN_MESSAGE", "chat.tools_json is not JSON: EOF while"),
        (
            ChatBuffer(tools_json='{"a": 1}'),
            "BROKEN_MESSAGE",
            "tools_json is an object: it must be a JSON array of obj",
        ),
        (
            ChatBuffer(tools_json="[{}, 1]"),
            "BROKEN_MESSAGE",
            "chat.tools_json[1] is a number: it must be a JSON object",
        ),
        (
            ChatBuffer(template_arguments_json="[]"),
            "BROKEN_MESSAGE",
            "chat.template_arguments_json is an array: it must",
        ),
        (ChatBuffer(template_arguments_json="null"), "BROKEN_MESSAGE", "chat.template_arguments_json is null: it must"),
        (ChatBuffer(template_arguments_json='{"a": 1e400}'), "BROKEN_MESSAGE", "a number that is beyond a double"),
        (ChatBuffer(template_arguments_json='{"a": [-1e400]}'), "BROKEN_MESSAGE", "a number that is beyond a double"),
        (
            ChatBuffer(template_arguments_json=f'{{"a": {10**309}}}'),
            "BROKEN_MESSAGE",
            "a number that is beyond a double",
        ),
        (ChatBuffer(template_arguments_json='{"a": NaN}'), "BROKEN_MESSAGE", "not JSON: expected value at line 1"),
        (ChatBuffer(template_arguments_json='{"a": -Infinity}'), "BROKEN_MESSAGE", "is not JSON: invalid number at"),
        (ChatBuffer(template_arguments_json='{"a": 1' + "0" * 5000 + "}"), "BROKEN_MESSAGE", "number out of range"),
        (ChatBuffer(template_arguments_json='{"a": "\\ud800"}'), "BROKEN_MESSAGE", "is not JSON: "),
        (
            ChatBuffer(template_arguments_json='{"a": 1, "a": 2}'),
            "BROKEN_MESSAGE",
            'Detected duplicate key "a" at line',
        ),
        (
            ChatBuffer(messages=[SAID, ChatMessage(fields_json='"x"')]),
            "BROKEN_MESSAGE",
            "chat.messages[1].fields_json is a string: it must be a JSON object",
        ),
        (
            ChatBuffer(messages=[ChatMessage(fields_json='{"content": null}')]),
            "CONTRADICTION",
            "chat.messages[0].fields_json has `content`: set chat.messages[0].content alone",
        ),
        (
            ChatBuffer(messages=[ChatMessage(fields_json="{}", fields=struct_pb2.Struct())]),
            "CONTRADICTION",
            "chat.messages[0] has both fields and fields_json: set fields_json alone",
        ),
        (
            ChatBuffer(tools=[struct_pb2.Struct()], tools_json="[]"),
            "CONTRADICTION",
            "chat has both tools and tools_json",
        ),
        (
            ChatBuffer(template_arguments=struct_pb2.Struct(), template_arguments_json="{}"),
            "CONTRADICTION",
            "chat has both template_arguments and template_arguments_json",
        ),
        (ChatBuffer(tools_json="[" * 65 + "]" * 65), "BROKEN_MESSAGE", f"nests deeper than {MAX_DEPTH} levels"),
        (ChatBuffer(tools_json="[" + "{}," * MAX_ENTRIES + "{}]"), "OUT_OF_RANGE", f"send at most {MAX_ENTRIES}"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(chat: ChatBuffer, reason: str, message: str) -> None:
    error = refusal(chat)
    assert error.reason == reason
    assert message in str(error)
    assert len(str(error)) < 300


def test_a_long_key_is_not_repeated() -> None:
    key = "k" * 10**6
    assert len(str(refusal(ChatBuffer(template_arguments_json=f'{{"{key}": 1, "{key}": 2}}')))) < 300


def test_the_deepest_arguments_that_the_gateway_takes_are_taken() -> None:
    arguments: dict[str, Any] = {}
    for _ in range(32):
        arguments = {"a": arguments}
    call = {"function": {"name": "f", "arguments": arguments}}
    chat = Chat(({**QUESTION, "tool_calls": [call]},))
    assert chat_from(sent(chat).chat) == chat


def test_all_texts_together_are_bounded() -> None:
    half = json.dumps({"a": [0] * (MAX_CHAT_VALUES // 2)})
    message = ChatMessage(role="user", fields_json=half)
    assert chat_from(ChatBuffer(messages=[message]))
    error = refusal(ChatBuffer(messages=[message, message], template_arguments_json=half))
    assert error.reason == "OUT_OF_RANGE"
    assert str(error) == (
        f"chat.template_arguments_json, with all before it, has more than {MAX_CHAT_VALUES} values, which is the most: "
        "send fewer"
    )
    parts = ChatBuffer(template_arguments_json=json.dumps({"a": [{"a": {"a": [[]]}}] * (MAX_PARTS // 6)}))
    assert re.search(f"more than {MAX_PARTS} strings, arrays and objects", str(refusal(parts)))


@pytest.mark.parametrize("shape", UNREAD_SHAPES)
def test_hostile_texts_are_refused_at_once(shape: str) -> None:
    error = refusal(GenerateRequest.FromString(UNREAD_SHAPES[shape]).chat)
    assert error.reason in {"BROKEN_MESSAGE", "OUT_OF_RANGE"}
    assert len(str(error)) < 300


@pytest.mark.parametrize("shape", WRITTEN_SHAPES)
def test_long_texts_of_json_are_read(shape: str) -> None:
    (tool,) = chat_from(GenerateRequest.FromString(WRITTEN_SHAPES[shape]).chat).tools
    assert len(json.dumps(tool)) > BYTES / 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}, "\ud800"])
def test_what_json_has_not_is_not_sent(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="the conversation cannot be sent"):
        to_request(Chat(({**QUESTION, "name": value},)), GenerationOptions())

"""Bodies that would take much more than their length: of time, or of memory."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gateway.chat.messages import checked_chat
from gateway.chat.request import ChatFields
from gateway.completions.request import CompletionFields
from gateway.fields import MAX_FIELDS, Defaults, StrictModel, validated
from gateway.http.errors import ApiError
from gateway.http.json_body import MAX_PARTS, MAX_VALUES, new_room, parse_object
from gateway.messages.request import CountFields, MessageFields
from gateway.responses.request import ResponseFields
from specd.sampling import MAX_CHAT_VALUES
from specd.text.chat import Chat
from tests.unit.growth import growth

BODY_BYTES = 4 * 2**20
REQUESTS: list[type[StrictModel]] = [ChatFields, CompletionFields, ResponseFields, MessageFields, CountFields]
MESSAGES = [{"role": "user", "content": "x"}]

# From a length to a body of about that length.
SHAPES: dict[str, Callable[[int], bytes]] = {
    "escapes": lambda size: b'{"prompt": "' + rb"\"" * (size // 2) + b'"}',
    "escapes without an end": lambda size: b'{"prompt": "' + rb"\"" * (size // 2),
    "backslashes": lambda size: b'{"prompt": "' + rb"\\" * (size // 2) + b'"}',
    "a long string": lambda size: b'{"prompt": "' + b"x" * size + b'"}',
    "spaces": lambda size: b" " * size,
    "strings": lambda size: b'{"prompt": [' + b'"",' * (size // 3) + b'""]}',
    "numbers": lambda size: b'{"prompt": [' + b"1," * (size // 2) + b"1]}",
    "wrong items": lambda size: b'{"messages": [{"role": "user", "content": [' + b"1," * (size // 2) + b"1]}]}",
    "arrays": lambda size: b'{"prompt": [' + b"[]," * (size // 3) + b"[]]}",
    "a deep array": lambda size: b'{"prompt": ' + b"[" * size,
    "objects": lambda size: b'{"messages": [' + b"{}," * (size // 3) + b"{}]}",
    "one key many times": lambda size: b"{" + b'"a":0,' * (size // 6) + b'"a":0}',
    "many unknown fields": lambda size: (
        f"{{{','.join(f'{chr(34)}{i:06}{chr(34)}:0' for i in range(size // 11))}}}".encode()
    ),
    "a large logit_bias": lambda size: (
        f'{{"logit_bias": {{{",".join(f"{chr(34)}{i:06}{chr(34)}:0" for i in range(size // 11))}}}}}'.encode()
    ),
    "a number of many digits": lambda size: b'{"seed": ' + b"9" * size + b"}",
}


def read(body: bytes) -> None:
    """Read and check a body as an endpoint does."""
    try:
        values = parse_object(body)
        for cls in REQUESTS:
            with contextlib.suppress(ApiError):
                validated(cls, values)
    except ApiError as error:
        assert error.status == 400
        assert len(str(error)) < 500


@pytest.mark.parametrize("shape", SHAPES)
def test_four_times_the_body_takes_about_four_times_as_long(shape: str) -> None:
    bodies = {size: SHAPES[shape](size) for size in (2**14, 2**16)}
    assert growth(lambda size: read(bodies[size]), 2**14) < 8  # quadratic growth would be 16 times


@pytest.mark.parametrize("shape", SHAPES)
def test_the_longest_body_takes_less_memory_than_three_of_its_kind(shape: str) -> None:
    body = SHAPES[shape](BODY_BYTES)
    tracemalloc.start()
    try:
        read(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(body)  # in addition to the body


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [2**10, 2**16])
def test_short_ones_are_read_or_refused_too(shape: str, size: int) -> None:
    read(SHAPES[shape](size))


def test_the_limits_are_exact() -> None:
    assert parse_object(b'{"a":[' + b"0," * (MAX_VALUES - 1) + b"0]}")
    with pytest.raises(ApiError, match=f"more than {MAX_VALUES} values"):
        parse_object(b'{"a":[' + b"0," * MAX_VALUES + b"0]}")
    assert parse_object(b'{"a":[' + b"[]," * (MAX_PARTS - 4) + b"[]]}")
    with pytest.raises(ApiError, match=f"more than {MAX_PARTS} strings, arrays and objects"):
        parse_object(b'{"a":[' + b"[]," * (MAX_PARTS - 3) + b"[]]}")


@pytest.mark.parametrize("cls", REQUESTS)
def test_each_array_and_each_object_of_a_request_has_a_bound(cls: type[StrictModel]) -> None:
    for place, schema in schemas_in(cls.model_json_schema(), cls.__name__):
        if schema.get("type") == "array":
            assert "maxItems" in schema, place
        if schema.get("type") == "object":
            assert "maxProperties" in schema, place


def schemas_in(value: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas in a schema with their places."""
    if isinstance(value, dict):
        yield place, value
        for key, part in value.items():
            yield from schemas_in(part, f"{place}.{key}")
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from schemas_in(part, f"{place}[{i}]")


def test_the_bounds_of_a_schema_hold() -> None:
    too_long: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": [1] * 10**6}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 10**5}]},
        {"messages": MESSAGES, "stop": [None] * 10**6},
        {"messages": MESSAGES, "logit_bias": {str(i): "x" for i in range(10**5)}},
        {"messages": MESSAGES, "chat_template_kwargs": {str(i): 0 for i in range(10**5)}},
        {"messages": MESSAGES, **{f"a{i}": 0 for i in range(MAX_FIELDS)}},
    ]
    for body in too_long:
        with pytest.raises(ApiError) as raised:
            validated(ChatFields, body)
        assert raised.value.status == 400
        assert len(str(raised.value)) < 400
    many_blocks: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 10**5}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [1] * 10**6}]}]},
        {"messages": MESSAGES, "system": [{"type": "text", "text": ""}] * 10**5},
        {"messages": MESSAGES, "tools": [{"name": "f"}] * 10**5},
    ]
    for body in many_blocks:
        with pytest.raises(ApiError) as raised:
            validated(MessageFields, {"max_tokens": 1, **body})
        assert len(str(raised.value)) < 400
    with pytest.raises(ApiError, match="at most 64 items"):
        validated(CompletionFields, {"prompt": ["x"] * 10**5})


def test_many_turns_of_one_role_become_one_in_linear_time() -> None:
    def join(size: int) -> None:
        turns = [{"role": "user", "content": "x" * 1024}] * (size // 1024)
        fields = validated(MessageFields, {"messages": turns, "max_tokens": 1})
        prompt = fields.message_generation(1, Defaults(max_tokens=10)).prompt
        assert isinstance(prompt, Chat)
        assert len(prompt.messages) == 1

    assert growth(join, 2**18) < 8


def chat_with(*arguments: str) -> ChatFields:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": text}} for text in arguments]
    return validated(ChatFields, {"messages": [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": calls}]})


def test_arguments_that_nest_too_deep_stay_text() -> None:
    deep = '{"a":' * 100_000
    prompt = chat_with(deep).chat_generation(1, Defaults(max_tokens=10)).prompt
    assert isinstance(prompt, Chat)
    assert prompt.messages[-1]["tool_calls"][0]["function"]["arguments"] == deep


def test_all_arguments_together_are_bounded() -> None:
    half = json.dumps({"a": [[]] * (MAX_PARTS // 2)})
    with pytest.raises(ApiError, match="more than"):
        chat_with(half, half, half).chat_generation(1, Defaults(max_tokens=10))
    room = new_room()
    parse_object(half.encode(), room)
    assert room.parts < MAX_PARTS // 2


@pytest.mark.parametrize("place", ["messages", "tools", "template_arguments"])
def test_a_conversation_has_no_more_values_than_it_may(place: str) -> None:
    values = {"a": [[0] * (MAX_CHAT_VALUES // 2)] * 2}
    given: dict[str, Any] = {"messages": [], "tools": [], "template_arguments": {}}
    given[place] = values if place == "template_arguments" else [values]
    with pytest.raises(ApiError, match="send fewer") as raised:
        checked_chat(**given)
    assert raised.value.status == 400

"""The longest accepted requests, in shapes that need much more memory or time than their bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from specd.v1.generation_pb2 import Chat, ChatMessage, GenerateRequest

BYTES = 4 * 2**20 - 64  # the limit of both doors by default, with room for the parts around the shape

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ANTHROPICS, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
_MESSAGES = '"messages":[{"role":"user","content":"x"}]'
SPECIAL = "<|endoftext|>"


def _filled(before: str, part: str, after: str, num_bytes: int = BYTES) -> bytes:
    """Return a body of about `num_bytes`, which repeats `part` between `before` and `after`."""
    return before.encode() + part.encode() * ((num_bytes - len(before) - len(after)) // len(part)) + after.encode()


def _numbered(before: str, after: str) -> bytes:
    """Return the same with parts that are fields of different names."""
    count = (BYTES - len(before) - len(after)) // 12
    return f"{before}{','.join(f'{chr(34)}{i:07}{chr(34)}:0' for i in range(count))}{after}".encode()


# By name, the path and the body.
HTTP_SHAPES: Mapping[str, tuple[str, bytes]] = {
    "a string of escapes": (COMPLETIONS, _filled('{"prompt":"', r"\"", '"}')),
    "one line": (COMPLETIONS, _filled('{"prompt":"', "x", '"}')),
    "special tokens": (CHAT, _filled('{"messages":[{"role":"user","content":"', SPECIAL, '"}]}')),
    "a deep array": (COMPLETIONS, _filled('{"prompt":', "[", "")),
    "a wide array": (COMPLETIONS, _filled('{"prompt":[', "[],", "[]]}")),
    "wrong items": (CHAT, _filled('{"messages":[{"role":"user","content":[', "1,", "1]}]}")),
    "a large logit_bias": (CHAT, _numbered(f'{{{_MESSAGES},"logit_bias":{{', "}}")),
    "large template arguments": (CHAT, _filled(f'{{{_MESSAGES},"chat_template_kwargs":{{"a":[', "0,", "0]}}")),
    "many tools": (RESPONSES, _filled('{"input":"x","tools":[', '{"type":"function"},', '{"type":"function"}]}')),
    "many stop strings": (CHAT, _filled(f'{{{_MESSAGES},"stop":[', '"x",', '"x"]}')),
    "one key many times": (RESPONSES, _filled("{", '"input":"x",', '"input":"x"}')),
    "many unknown fields": (CHAT, _numbered(f"{{{_MESSAGES},", "}")),
    "many blocks": (
        ANTHROPICS,
        _filled('{"max_tokens":1,"messages":[{"role":"user","content":[', '{"type":"text"},', '{"type":"text"}]}]}'),
    ),
    "many results of tools": (
        ANTHROPICS,
        _filled('{"max_tokens":1,"messages":[', '{"role":"user","content":[{"type":"tool_result"}]},', "1]}"),
    ),
    "a large input of a tool": (
        ANTHROPICS,
        _filled(
            '{"max_tokens":1,"messages":[{"role":"assistant","content":[{"type":"tool_use","input":{"a":[',
            "0,",
            "0]}}]}]}",
        ),
    ),
    "a large tool that must be called": (
        CHAT,
        _filled(
            f'{{{_MESSAGES},"tool_choice":"required","tools":[{{"type":"function","function":{{"name":"f","strict":true,'
            '"parameters":{"properties":{"a":{"enum":[',
            "0,",
            "0]}}}}}]}",
        ),
    ),
    "a long text of tokens": (TOKENIZE, _filled('{"content":"', "x", '"}')),
    "many tokens of a text": (DETOKENIZE, _filled('{"tokens":[', "1,", "1]}")),
    "special tokens to count": (COUNT, _filled('{"messages":[{"role":"user","content":"', SPECIAL, '"}]}')),
}


def _number(value: int) -> bytes:
    """Return a number as protobuf writes it."""
    written = bytearray()
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    return bytes([*written, value])


def _field(number: int, content: bytes) -> bytes:
    """Return a field of a message that has a length."""
    return _number(number << 3 | 2) + _number(len(content)) + content


def _many(part: bytes) -> bytes:
    return part * ((BYTES - 64) // len(part))


def _nested(numbers: Iterable[int]) -> bytes:
    """Return messages in messages, by the numbers of their fields, the innermost first."""
    parts: list[bytes] = []
    length = 0
    for number in numbers:
        head = _number(number << 3 | 2) + _number(length)
        parts.append(head)
        length += len(head)
        if length > BYTES - 64:
            break
    return b"".join(reversed(parts))


_SAID = GenerateRequest(chat=Chat(messages=[ChatMessage(role="user", content="x")])).SerializeToString()


def _arguments(items: bytes) -> bytes:
    """Return a conversation whose template arguments have an array of these values, each a field 1."""
    return _SAID + _field(5, _field(3, _field(1, _field(1, b"a") + _field(2, _field(6, items)))))


def _json(before: str, part: str, after: str, *, is_tools: bool = False) -> bytes:
    """Return a conversation whose template arguments, or tools, which the template writes, are this JSON text."""
    return _SAID + _field(5, _field(5 if is_tools else 6, _filled(before, part, after, BYTES - 64)))


# JSON as it should be, which is too long for any context when the template has written it.
WRITTEN_SHAPES = {
    "a string of JSON": _json('[{"a":"', "x", '"}]', is_tools=True),
    "a string of JSON with one wide character": _json('[{"a":"\U0001f600', "x", '"}]', is_tools=True),
    "escapes in JSON": _json('[{"a":"', r"\"", '"}]', is_tools=True),
    "large whole numbers in JSON": _json('[{"a":[', "9" * 300 + ",", "9]}]", is_tools=True),
}
# What the coordinator reads, and gives no template.
SPECIAL_SHAPES = {"special tokens in JSON": _json('[{"a":"', SPECIAL, '"}]', is_tools=True)}
# What the coordinator does not read.
UNREAD_SHAPES = {
    "whole numbers beyond a double in JSON": _json('{"a":[', "9" * 4000 + ",", "9]}"),
    "deep JSON": _json("", "[", ""),
    "deep JSON of objects": _json("", '{"a":', ""),
    "wide JSON": _json('{"a":[', "[],", "[]]}"),
    "numbers in JSON": _json('{"a":[', "0,", "0]}"),
    "one key many times in JSON": _json("{", '"a":0,', '"a":0}'),
    "a whole number in JSON": _json('{"a":', "9", "}"),
    "an exponent in JSON": _json('{"a":1e', "9", "}"),
    "a string without an end in JSON": _json('{"a":"', r"\"", ""),
    "empty tools in JSON": _json("[", "{},", "{}]", is_tools=True),
    "values in JSON of many messages": _field(5, _many(_field(1, _field(4, b'{"a":[' + b"0," * 1000 + b"0]}")))),
}

# By name, a serialised GenerateRequest: its prompt is field 1, 2 or 5, its sampling 6, and its stop conditions 7.
GRPC_SHAPES: Mapping[str, bytes] = {
    "a string of quotes": GenerateRequest(text='"' * BYTES).SerializeToString(),
    "one line": GenerateRequest(text="x" * BYTES).SerializeToString(),
    "special tokens": GenerateRequest(
        chat=Chat(messages=[ChatMessage(role="user", content=SPECIAL * (BYTES // len(SPECIAL)))])
    ).SerializeToString(),
    "a role of control characters": GenerateRequest(
        chat=Chat(messages=[ChatMessage(role="\x01" * BYTES, content="x")])
    ).SerializeToString(),
    "a deep array": _arguments(_nested(itertools.cycle((6, 1)))),
    "a wide array": _arguments(_many(_field(1, b"\x32\x00"))),
    "empty messages": _field(5, _many(_field(1, b""))),
    "a large logit_bias": _SAID + _field(6, _many(_field(9, b""))),
    "large template arguments": _arguments(_many(_field(1, b"\x11" + bytes(8)))),
    "many tools": _SAID + _field(5, _many(_field(2, b""))),
    "many stop strings": _SAID + _field(7, _many(_field(4, b""))),
    "one field many times": _SAID + _many(b"\x18\x01"),
    "token ids": _field(2, _field(1, _many(b"\x01"))),
    **WRITTEN_SHAPES,
    **SPECIAL_SHAPES,
    **UNREAD_SHAPES,
}

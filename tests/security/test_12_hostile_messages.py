"""Check 12: messages at the edges of their types, to every RPC, by descriptor."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor

from specd.supervisor import Stack
from specd.v1.generation_pb2 import GenerateRequest
from tests.e2e.fuzz_requests import METHODS
from tests.e2e.processes import draft_of
from tests.security.standing import Standing

DISTINCT = list({(process, method.full_name): (process, method) for process, method in METHODS}.values())
EXPECTED = {
    *("OK", "CANCELLED", "INVALID_ARGUMENT", "NOT_FOUND", "ABORTED", "FAILED_PRECONDITION"),
    *("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "UNIMPLEMENTED"),
}
LENGTH_DELIMITED = 2


def varint(value: int) -> bytes:
    """Return a number as protobuf writes it."""
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def field(number: int, content: bytes) -> bytes:
    """Return a field with bytes as its content: a string, a message, or packed numbers."""
    return varint(number << 3 | LENGTH_DELIMITED) + varint(len(content)) + content


def hostile(method: MethodDescriptor) -> Iterator[tuple[str, bytes]]:
    """Yield messages to a method, as bytes: for each field of its request the values at the edges."""
    message: Any = method.input_type
    yield "an unknown field", field(2**29 - 1, b"x")
    yield "a length that lies", b"\x0a\xff\xff\xff\x7f"
    yield "a group without end", b"\x0b" * 10_000
    for descriptor in message.fields:
        name, number = descriptor.name, descriptor.number
        if descriptor.type == FieldDescriptor.TYPE_STRING:
            yield f"{name}: invalid UTF-8", field(number, b"\xff\xfe\xc0")
        elif descriptor.type == FieldDescriptor.TYPE_MESSAGE:
            yield f"{name}: nested 20,000 deep", nested(number, 20_000)
            for inner in descriptor.message_type.fields:
                if inner.type == FieldDescriptor.TYPE_FLOAT:
                    for number_ in (float("nan"), float("inf"), -float("inf"), -0.0):
                        content = varint(inner.number << 3 | 5) + struct.pack("<f", number_)
                        yield f"{name}.{inner.name}: {number_}", field(number, content)
        elif descriptor.is_repeated:
            yield f"{name}: a million", field(number, b"\x01" * (4_000_000 if descriptor.type == 2 else 1_000_000))
        elif descriptor.type not in {FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_FLOAT}:
            for value in (2**64 - 1, 2**63, 2**31, 2**32 - 1):  # also -1, INT_MIN, and unknown enum values
                yield f"{name}: {value}", varint(number << 3) + varint(value)


def nested(number: int, depth: int) -> bytes:
    """Return messages in messages, each in the same field."""
    data = b""
    for _ in range(depth):
        data = field(number, data)
        if len(data) > 200_000:
            break
    return data


async def test_a_hostile_message_gets_a_status_that_blames_it(stack: Stack, standing: Standing) -> None:
    children = {"coordinator": stack.coordinator, "draft": draft_of(stack), "target": stack.target}
    unexpected = []
    for process, method in DISTINCT:
        path = f"/{method.containing_service.full_name}/{method.name}"
        async with grpc.aio.insecure_channel(children[process].facts["address"]) as channel:
            for kind, data in hostile(method):
                outcome = await outcome_of(channel, path, data, method.client_streaming)
                if outcome not in EXPECTED:
                    unexpected.append(f"{path}: {kind}: {outcome}")
    assert unexpected == []


async def outcome_of(channel: Any, path: str, data: bytes, takes_stream: bool) -> str:
    """Return the status of a call with these bytes; for a call that continues, after its first answers."""
    call: Any = channel.stream_stream(path)(iter([data]), timeout=30) if takes_stream else None
    call = call or channel.unary_stream(path)(data, timeout=30)
    try:
        async with asyncio.timeout(3):
            for _ in range(2):
                if await call.read() is grpc.aio.EOF:
                    break
            else:
                call.cancel()
            code: grpc.StatusCode = await call.code()
    except grpc.aio.AioRpcError as error:
        code = error.code()
        if code is grpc.StatusCode.INTERNAL and error.details() == "Internal error from Core":
            return "CANCELLED"  # what grpc.aio's client makes of a status that came while it was writing
    except (asyncio.CancelledError, TimeoutError):
        call.cancel()
        return "CANCELLED"
    return code.name


async def test_a_chat_nested_deeply_is_refused(standing: Standing) -> None:
    arguments: Any = {}
    for _ in range(40):
        arguments = {"a": arguments}
    request = GenerateRequest()
    request.chat.messages.add(role="user", content="x")
    request.chat.template_arguments.update(arguments)
    data = request.SerializeToString()
    async with grpc.aio.insecure_channel(standing.stack.address) as channel:
        assert await outcome_of(channel, "/specd.v1.GenerationService/Generate", data, False) in EXPECTED
    assert not [line for line in standing.new_log_lines() if line.startswith("{") and "exception" in json.loads(line)]

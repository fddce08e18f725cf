"""Calls that no service gets to see."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeAlias, cast

import grpc
import pytest
from structlog.testing import capture_logs

from specd.client.protocol.errors import error_from
from specd.client.resuming.generation import Connection, ResumableGeneration, Turn
from specd.client.resuming.retries import DEFAULT_RETRIES
from specd.errors import ResourceExhaustedError, error_info
from specd.identity.roles import Role
from specd.rpc.access import Guard
from specd.rpc.refusals import BrokenMessageError
from specd.rpc.server import Server
from specd.v1.draft_pb2 import ProposeRequest
from specd.v1.generation_pb2 import GenerateRequest, TokenIds
from specd.v1.session_pb2 import GetSessionRequest

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

GOOD = ProposeRequest(round=7).SerializeToString()
BROKEN = {
    "no protobuf": b"\xff\xff\xff",
    "cut off": GOOD[:-1],
    "text that is not UTF-8": GetSessionRequest(session_id="aa").SerializeToString().replace(b"aa", b"\xff\xfe"),
}


async def unary(request: Any, context: Context) -> Any:
    return request


async def write(request: Any, context: Context) -> None:
    await context.write(request)


async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
    yield request


async def read(_: Any, context: Context) -> None:
    while (request := await context.read()) is not grpc.aio.EOF:
        await context.write(request)


async def iterate(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
    async for request in requests:
        yield request


async def report(_: Any, context: Context) -> None:
    """Handle the error of a read as the workers do: it is one of ours."""
    try:
        await read(None, context)
    except BrokenMessageError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.reason)


SINGLE = {"unary": unary, "write": write, "generate": generate}
STREAMS = {"read": read, "iterate": iterate, "report": report}


@contextlib.asynccontextmanager
async def serving(directory: Path, message: Any = ProposeRequest) -> AsyncIterator[grpc.aio.Channel]:
    """Serve a method of each kind that hands requests back; give a channel to it."""
    address = f"unix:{directory}/server"
    server = Server(address, (), Guard(Role.DRAFT_WORKER, listen=address))
    codec: tuple[Any, Any] = message.FromString, message.SerializeToString
    handlers: dict[str, Any] = {
        "unary": grpc.unary_unary_rpc_method_handler(unary, *codec),
        **{name: grpc.unary_stream_rpc_method_handler(SINGLE[name], *codec) for name in ("write", "generate")},
        **{name: grpc.stream_stream_rpc_method_handler(STREAMS[name], *codec) for name in STREAMS},
    }
    server.grpc.add_registered_method_handlers("test", handlers)
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel
    await server.stop(grace_seconds=1)


async def answers(channel: grpc.aio.Channel, method: str, *requests: bytes) -> list[bytes]:
    """Return what a method answers to these bytes. Raises AioRpcError, to which `got` gives the answers before it."""
    got: list[bytes] = []
    try:
        async with asyncio.timeout(20):
            call: Any = channel.stream_stream(f"/test/{method}")(cast(Any, iter(requests)))
            got.extend([answer async for answer in call])
    except grpc.aio.AioRpcError as error:
        error.got = got  # type: ignore[attr-defined]
        raise
    return got


@pytest.mark.parametrize("method", [*SINGLE, *STREAMS])
async def test_messages_go_through(tmp_path: Path, method: str) -> None:
    async with serving(tmp_path) as channel:
        assert await answers(channel, method, GOOD) == [GOOD]


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("method", [*SINGLE, *STREAMS])
async def test_bytes_that_are_no_message_are_refused(tmp_path: Path, method: str, broken: str) -> None:
    message = GetSessionRequest if broken == "text that is not UTF-8" else ProposeRequest
    async with serving(tmp_path, message) as channel:
        with capture_logs() as log, pytest.raises(grpc.aio.AioRpcError) as raised:
            await answers(channel, method, BROKEN[broken])
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        if method != "report":
            assert error_info(raised.value).reason == "BROKEN_MESSAGE"
            assert f"/test/{method}" in str(raised.value.details())
            assert [entry["reason"] for entry in log] == ["BROKEN_MESSAGE"]


@pytest.mark.parametrize("method", STREAMS)
async def test_a_broken_message_in_the_middle_of_a_stream_is_refused(tmp_path: Path, method: str) -> None:
    async with serving(tmp_path) as channel:
        call: Any = channel.stream_stream(f"/test/{method}")()
        await call.write(GOOD)
        assert await call.read() == GOOD
        await call.write(BROKEN["no protobuf"])
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("method", [b"/test/nosuch", b"/nosuch/unary", b"/", b"/test/\xff\xfe"])
async def test_a_method_that_is_not_there_is_refused_and_ends_nothing(tmp_path: Path, method: bytes) -> None:
    """Nor does one whose name is not UTF-8, which ends the server of grpc.aio."""

    def call() -> grpc.StatusCode:
        with grpc.insecure_channel(f"unix:{tmp_path}/server") as channel:
            multicallable: Any = channel.unary_unary("/test/any")
            multicallable._method = method  # any other way encodes it
            with pytest.raises(grpc.RpcError) as raised:
                multicallable(GOOD, timeout=20)
            return raised.value.code()

    async with serving(tmp_path) as channel:
        assert await asyncio.to_thread(call) is grpc.StatusCode.UNIMPLEMENTED
        assert await answers(channel, "unary", GOOD) == [GOOD]


# -- What is too large


MOST = 2**20


@contextlib.asynccontextmanager
async def taking_little(directory: Path) -> AsyncIterator[grpc.aio.Channel]:
    """Serve methods with long and with short requests, of at most 1 MiB, that count the bytes they get."""

    async def count(request: bytes, context: Context) -> bytes:
        return str(len(request)).encode()

    address = f"unix:{directory}/server"
    server = Server(address, (), Guard(Role.COORDINATOR, listen=address), max_message_bytes=MOST)
    handler: Any = grpc.unary_unary_rpc_method_handler(count)
    server.grpc.add_registered_method_handlers("test", {"Generate": handler, "Short": handler})
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel
    await server.stop(grace_seconds=1)


async def reason_of(channel: grpc.aio.Channel, method: str, num_bytes: int, metadata_bytes: int = 0) -> str:
    """Return the reason for which a call is refused: "" if gRPC refuses it, "OK" if it is not refused."""
    metadata = (("x-large", "v" * metadata_bytes),) if metadata_bytes else ()
    call: Any = channel.unary_unary(f"/test/{method}")
    try:
        assert await call(b"x" * num_bytes, metadata=metadata, timeout=20) == str(num_bytes).encode()
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        reason = error_info(error).reason
        assert not reason or "send at most" in str(error.details())
        assert all(key != "retry-after" for key, _ in error.trailing_metadata() or ())
        return reason
    return "OK"


async def test_what_is_too_large_is_refused_with_a_reason_unless_grpc_must_keep_it_out(tmp_path: Path) -> None:
    async with taking_little(tmp_path) as channel:
        assert await reason_of(channel, "Generate", MOST) == "OK"
        assert await reason_of(channel, "Generate", MOST + 1) == "MESSAGE_TOO_LARGE"
        assert await reason_of(channel, "Generate", 2 * MOST) == "MESSAGE_TOO_LARGE"
        assert await reason_of(channel, "Generate", 2 * MOST + 1) == ""
        assert await reason_of(channel, "Short", 64 * 1024) == "OK"
        assert await reason_of(channel, "Short", MOST) == "MESSAGE_TOO_LARGE"
        for _ in range(20):  # gRPC would refuse some of them, by chance
            assert await reason_of(channel, "Short", 1, metadata_bytes=15 * 1024) == "OK"
            assert await reason_of(channel, "Short", 1, metadata_bytes=20_000) == "METADATA_TOO_LARGE"
        assert await reason_of(channel, "Short", 1, metadata_bytes=40_000) == ""


async def test_an_error_of_grpcs_own_is_not_asked_for_again(tmp_path: Path) -> None:
    """It would be refused as often as it is sent."""
    retries = ResumableGeneration(
        Turn(GenerateRequest(text="x")),
        policy=DEFAULT_RETRIES,
        clock=time.monotonic,
        chance=lambda: 0.5,
        connection=Connection(has_answered=True),
    )
    async with taking_little(tmp_path) as channel:
        call: Any = channel.unary_unary("/test/Generate")
        for num_bytes in (MOST + 1, 2 * MOST + 1):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call(b"x" * num_bytes, timeout=20)
            error = error_from(raised.value, "server")
            assert isinstance(error, ResourceExhaustedError)
            with pytest.raises(ResourceExhaustedError):
                retries.failed(error)


async def test_a_long_message_is_parsed_beside_the_loop_and_one_of_too_many_values_not_at_all(tmp_path: Path) -> None:
    parsed_on: list[threading.Thread] = []

    def parse(data: bytes) -> GenerateRequest:
        parsed_on.append(threading.current_thread())
        return GenerateRequest.FromString(data)

    address = f"unix:{tmp_path}/server"
    server = Server(address, (), Guard(Role.COORDINATOR, listen=address))
    handler = grpc.unary_stream_rpc_method_handler(generate, parse, GenerateRequest.SerializeToString)
    server.grpc.add_registered_method_handlers("specd.v1.GenerationService", {"Generate": cast(Any, handler)})
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            call: Any = channel.unary_stream("/specd.v1.GenerationService/Generate")
            for length in (1, 100_000):
                request = GenerateRequest(text="x" * length).SerializeToString()
                assert [answer async for answer in call(request)] == [request]
            assert [thread is threading.main_thread() for thread in parsed_on] == [True, False]
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call(GenerateRequest(token_ids=TokenIds(ids=[1] * 2_000_000)).SerializeToString()).read()
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error_info(raised.value).reason == "OUT_OF_RANGE"
            assert len(parsed_on) == 2
    finally:
        await server.stop(grace_seconds=1)

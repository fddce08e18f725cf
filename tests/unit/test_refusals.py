"""Calls that no service gets to see."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeAlias, cast

import grpc
import pytest
from structlog.testing import capture_logs

from specd.errors import error_info
from specd.identity.roles import Role
from specd.rpc.access import Guard
from specd.rpc.refusals import BrokenMessageError
from specd.rpc.server import Server
from specd.v1.draft_pb2 import ProposeRequest
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

"""Who makes a call, as its service sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest

from specd.caller import Caller, CallerLimits
from specd.errors import UnauthenticatedError, error_info
from specd.rpc.access import current_caller
from specd.rpc.refusals import refusing_server

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


async def unary(request: bytes, context: Context) -> bytes:
    return current_caller().name.encode()


async def generate(request: bytes, context: Context) -> AsyncIterator[bytes]:
    yield current_caller().name.encode()


async def read(_: Any, context: Context) -> None:
    while await context.read() is not grpc.aio.EOF:
        await asyncio.sleep(0.01)  # other calls run meanwhile
        await context.write(current_caller().name.encode())


HANDLERS: dict[str, Any] = {
    "unary": grpc.unary_unary_rpc_method_handler(unary),
    "generate": grpc.unary_stream_rpc_method_handler(generate),
    "read": grpc.stream_stream_rpc_method_handler(read),
}


def identify(method: str, context: Context) -> Caller:
    name = str(dict(context.invocation_metadata() or ()).get("name", ""))
    if not name:
        raise UnauthenticatedError("NO_NAME", f"{method} wants a name")
    return Caller(name, CallerLimits(max_tokens=len(name)))


@pytest.fixture
async def channel(tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    server = refusing_server([], identify)
    server.add_registered_method_handlers("test", HANDLERS)
    server.add_insecure_port(f"unix:{tmp_path}/server")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/server") as connected:
        yield connected
    await server.stop(None)


async def call(channel: grpc.aio.Channel, method: str, **metadata: str) -> list[bytes]:
    async with asyncio.timeout(20):
        requests: Any = iter([b"one"])
        running: Any = channel.stream_stream(f"/test/{method}")(requests, metadata=tuple(metadata.items()))
        return [answer async for answer in running]


@pytest.mark.parametrize("method", HANDLERS)
async def test_calls_at_the_same_time_each_have_their_own_caller(channel: grpc.aio.Channel, method: str) -> None:
    names = [f"client-{i}" for i in range(20)]
    answers = await asyncio.gather(*(call(channel, method, name=name) for name in names))
    assert answers == [[name.encode()] for name in names]
    assert current_caller() == Caller()


@pytest.mark.parametrize("method", HANDLERS)
async def test_a_caller_who_is_not_known_is_refused_with_a_reason(channel: grpc.aio.Channel, method: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(channel, method)
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert error_info(raised.value).reason == "NO_NAME"
    assert f"/test/{method} wants a name" in str(raised.value.details())

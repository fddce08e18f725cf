"""The life of a server, where no process is needed to see it."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path

import grpc
import pytest
from prometheus_client import Counter

from specd.errors import UnavailableError, error_info
from specd.identity.roles import Role
from specd.rpc.access import Guard
from specd.rpc.reporting import reporting_errors
from specd.rpc.server import Server


def test_a_stop_waits_for_what_a_call_does_after_its_status(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/server"
    done: list[str] = []

    async def refuse(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        try:
            await context.write(b"begun")
            await stopping.wait()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "stopping")
        finally:
            await asyncio.sleep(0.05)
            done.append("put away")

    async def serve_and_stop() -> list[str]:
        server = Server(address, (), Guard(Role.COORDINATOR, listen=address))
        method_handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(refuse)
        server.grpc.add_registered_method_handlers("test", {"Call": method_handler})
        await server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/test/Call")
            assert await method(b"").read() == b"begun"
            stopping.set()
            await server.stop(grace_seconds=5)
            return done.copy()

    stopping = asyncio.Event()
    assert asyncio.run(serve_and_stop()) == ["put away"]


def test_a_pause_of_the_machine_does_not_take_the_reason_from_an_ended_call(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/server"
    errors = Counter("errors", "Calls that ended with an error.", ["code", "reason"], registry=None)

    async def serve_and_stop() -> grpc.aio.AioRpcError:
        server = Server(address, (), Guard(Role.COORDINATOR, listen=address))

        async def call(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
            stopping = partial(UnavailableError, "STOPPING", "stopping", retry_after_seconds=1.0)
            async with reporting_errors(context, errors), server.until_stopped(stopping):
                await context.write(b"begun")
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0.05)  # puts its session away

        method_handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(call)
        server.grpc.add_registered_method_handlers("test", {"Call": method_handler})
        await server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/test/Call")
            running = method(b"")
            assert await running.read() == b"begun"
            # The event loop stands still when the calls should end, for longer than they have to hand back.
            asyncio.get_running_loop().call_later(0.2, time.sleep, 4.0)
            stopping = asyncio.ensure_future(server.stop(grace_seconds=0.3))
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await running.read()
            await stopping
            return raised.value

    assert error_info(asyncio.run(serve_and_stop())).reason == "STOPPING"

"""The life of a server, where no process is needed to see it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc

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
        server = Server(address, ())
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

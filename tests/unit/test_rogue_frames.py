"""A worker that sends wrong frames in a shared call: a session gets an error, and nothing else happens."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from coordinator.core import SessionSetup
from coordinator.workers.errors import WorkerError, WorkerLostError
from coordinator.workers.multiplexer import Multiplexer
from coordinator.workers.stream import GrpcTargetStream
from specd.rpc.messages import INCARNATION
from specd.sampling import Sampling
from specd.v1 import multiplex_pb2_grpc
from specd.v1.multiplex_pb2 import End, Frame, MultiplexResponse
from specd.v1.target_pb2 import VerifyRequest, VerifyResponse
from tests.unit.test_multiplexing import BIG, LIFE, SECONDS, serving

LIES = {
    "frames of streams that were not begun": [
        MultiplexResponse(frames=[Frame(stream=9, message=b"x"), Frame(stream=8, end=End())])
    ],
    "no content": [MultiplexResponse(frames=[Frame(stream=1)])],
    "a session of its own": [MultiplexResponse(frames=[Frame(stream=1, session_id="mine")])],
    "a broken response": [MultiplexResponse(frames=[Frame(stream=1, message=b"\xff\xff")])],
    "an unknown status": [MultiplexResponse(frames=[Frame(stream=1, end=End(code=99, message="\x1b[2J"))])],
    "details that cannot be parsed": [
        MultiplexResponse(frames=[Frame(stream=1, end=End(code=9, details=b"\xff\xff"))])
    ],
    "an answer to nothing": [
        MultiplexResponse(frames=[Frame(stream=1, message=VerifyResponse(round=7).SerializeToString())])
    ],
    "nothing": [MultiplexResponse()],
    "an end": [],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_worker_costs_a_session_an_error_and_nothing_else(lie: str) -> None:
    class Liar(multiplex_pb2_grpc.MultiplexServiceServicer):
        async def Multiplex(self, request_iterator: Any, context: Any) -> None:
            await context.send_initial_metadata(((INCARNATION, LIFE),))
            await context.read()
            for frames in LIES[lie]:
                await context.write(frames)

    async def run() -> None:
        async with serving(Liar()) as worker, grpc.aio.insecure_channel(worker.address) as channel:
            multiplexer = Multiplexer(channel, VerifyResponse.FromString)
            setup = SessionSetup("s", Sampling(), namespace=b"")
            stream = GrpcTargetStream(multiplexer.open("s"), setup, LIFE)
            await stream._send(VerifyRequest(token_ids=[1]), SECONDS)
            with pytest.raises(WorkerError) as raised:
                await stream._receive(SECONDS)
            assert raised.value.reason.startswith("TARGET_")
            assert isinstance(raised.value, WorkerLostError) == (
                lie in {"nothing", "an end", "details that cannot be parsed"}
            )
            stream.close()
            assert stream._ending is None or await asyncio.wait({stream._ending}, timeout=5)

    asyncio.run(asyncio.wait_for(run(), SECONDS))


def test_a_worker_that_never_ends_its_answers_is_read_no_more() -> None:
    ended = asyncio.Event()

    class Endless(multiplex_pb2_grpc.MultiplexServiceServicer):
        async def Multiplex(self, request_iterator: Any, context: Any) -> None:
            frames = MultiplexResponse(frames=[Frame(stream=1, message=BIG.SerializeToString())])
            try:
                while True:
                    await context.write(frames)
            finally:
                ended.set()

    async def run() -> None:
        async with serving(Endless()) as worker, grpc.aio.insecure_channel(worker.address) as channel:
            multiplexer = Multiplexer(channel, VerifyResponse.FromString)
            left, stays = multiplexer.open("left"), multiplexer.open("stays")
            await left.read()
            left.cancel()
            with pytest.raises(ValueError, match="stream 1, which there is not"):
                await stays.read()
            await ended.wait()  # its call is cancelled

    asyncio.run(asyncio.wait_for(run(), SECONDS))


def test_frames_that_cannot_be_parsed_end_the_call() -> None:
    async def babble(request_iterator: Any, context: Any) -> None:
        await context.read()
        await context.write(b"\xff\xff")

    async def run() -> None:
        server = grpc.aio.server()
        handler: Any = grpc.stream_stream_rpc_method_handler(babble)
        server.add_registered_method_handlers("specd.v1.MultiplexService", {"Multiplex": handler})
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            multiplexer = Multiplexer(channel, VerifyResponse.FromString)
            call = multiplexer.open("s")
            with pytest.raises(ValueError, match="parsed"):
                await call.read()
            assert multiplexer.has_ended
        await server.stop(None)

    asyncio.run(asyncio.wait_for(run(), SECONDS))

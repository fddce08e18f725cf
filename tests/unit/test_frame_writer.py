"""The writing end of a shared call, when the call ends."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from specd.rpc.frame_writer import FrameWriter
from specd.v1.multiplex_pb2 import Frame

MANY = 10_000


def test_a_stream_that_only_writes_is_cancelled_after_its_call_has_ended() -> None:
    num_written = 0

    async def refuse(frames: list[Frame]) -> None:
        raise grpc.aio.UsageError("RPC already finished.")

    async def write_on(writer: FrameWriter) -> None:
        nonlocal num_written
        for _ in range(MANY):  # enough to tell, and an end for a writer that lets nothing else run
            await writer.make_room()
            writer.put(Frame(stream=1, message=b"x" * (1 << 20)))
            num_written += 1

    async def run() -> None:
        writing = asyncio.create_task(write_on(FrameWriter(refuse)))
        for _ in range(10):
            await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing

    asyncio.run(run())
    assert num_written < 100

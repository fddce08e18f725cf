"""Check 10: connections and calls that are begun and left, also before a word was said."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from specd.rpc.limits import most_connections
from specd.supervisor import Stack
from tests.security.attacks import attacking
from tests.security.http2 import connect
from tests.security.standing import Standing, assert_served


def open_files(pid: int) -> int:
    """Return how many files a process has open, on Linux."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.parametrize(("attack", "connections"), [("idle_connections", 2), ("idle_streams", 4)])
async def test_others_are_served_beside_idle_ones(standing: Standing, attack: str, connections: int) -> None:
    async with attacking(attack, standing.stack.address, connections=connections, rate=400, seconds=4):
        await assert_served(standing, num_times=1)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the open files of a process are read from /proc")
async def test_a_server_accepts_a_limited_number_of_connections(stack: Stack, standing: Standing) -> None:
    before = open_files(stack.coordinator.pid)
    streams = []
    try:
        for _ in range(most_connections() + 100):
            streams.append(await connect(stack.address))  # noqa: PERF401 - what is open by then is closed
        await asyncio.sleep(1)
        assert open_files(stack.coordinator.pid) - before <= most_connections() + 20
    finally:
        for _, writer in streams:
            writer.transport.abort()
    await asyncio.sleep(0.5)
    await assert_served(standing, num_times=1)


async def test_who_does_not_say_a_word_is_disconnected(stack: Stack) -> None:
    reader, writer = await connect(stack.address)
    async with asyncio.timeout(40):
        while await reader.read(2**16):
            pass
    writer.transport.abort()

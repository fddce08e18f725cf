"""Check 9, by a client: one that does not read frees its place for others, and soon loses its session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.v1.generation_pb2 import GenerateRequest, StopConditions
from tests.e2e.calls import responses_to
from tests.e2e.processes import PATIENCE_SECONDS, eventually, read_metric, wait_until_idle
from tests.raw_client import RawClient
from tests.security.http2 import Connection

pytestmark = pytest.mark.alone

PATH = "/specd.v1.GenerationService/Generate"
STALL_SECONDS = 8.0
REQUEST = GenerateRequest(text="def f(", max_tokens=1500, num_draft_tokens=0, stop=StopConditions(ignore_eos=True))


@pytest.fixture(scope="module")
async def narrow_stack() -> AsyncIterator[Stack]:
    """A stack with two places."""
    environment = {
        "SPECD_COORDINATOR_MAX_SESSIONS": "2",
        "SPECD_COORDINATOR_CLIENT_STALL_SECONDS": f"{STALL_SECONDS:g}",
        "OPENBLAS_NUM_THREADS": "1",
    }
    async with Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=environment) as running:
        yield running


def count(stack: Stack, name: str) -> float:
    return read_metric(stack.coordinator, f"specd_{name}")


async def test_sessions_whose_clients_never_read_give_up_their_places_and_end(narrow_stack: Stack) -> None:
    connection = await Connection.open(narrow_stack.address, window=0)
    try:
        streams = [connection.begin(PATH, REQUEST.SerializeToString()) for _ in range(4)]
        await connection.flush()
        began_at = time.perf_counter()
        reading = asyncio.ensure_future(keep_reading(connection))
        # Long before the first of them ends, all have run ahead up to the limit, and wait without a place.
        await eventually(lambda: count(narrow_stack, "paused_sessions") >= 3)
        async with RawClient(narrow_stack.address) as client, asyncio.timeout(PATIENCE_SECONDS):
            responses = await responses_to(client.generate("import", max_tokens=3))
        assert responses[-1].statistics.generated_tokens == 3

        await wait_until_idle(narrow_stack)
        assert time.perf_counter() - began_at > STALL_SECONDS
        assert count(narrow_stack, "paused_sessions") == count(narrow_stack, "reserved_bytes") == 0
        errors = read_metric(
            narrow_stack.coordinator, "specd_errors_total", code="DEADLINE_EXCEEDED", reason="CLIENT_STALLED"
        )
        assert errors == 4

        # A client that reads again learns the reason of the end.
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        connection.h2.increment_flow_control_window(2**20, streams[0])
        await connection.flush()
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await connection.status_of(streams[0]) == "4"
    finally:
        connection.close()


async def test_a_slow_reader_gets_everything(narrow_stack: Stack) -> None:
    async with RawClient(narrow_stack.address) as client:
        whole = await responses_to(client.generate("def f(", max_tokens=300, num_draft_tokens=0))
        tokens: list[int] = []
        async for response in client.generate("def f(", max_tokens=300, num_draft_tokens=0):
            tokens += [token.id for token in response.tokens]
            await asyncio.sleep(0.005)
    assert tokens == [token.id for response in whole for token in response.tokens]


async def keep_reading(connection: Connection) -> None:
    """Answer pings and settings, and no more."""
    while True:
        await connection.receive()

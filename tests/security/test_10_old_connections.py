"""Check 10, of connections in use: one that is old takes no new calls, and loses none; who pings too often is out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from h2.errors import ErrorCodes
from h2.events import PingAckReceived
from hyperframe.frame import Frame, GoAwayFrame, PingFrame

from specd import AsyncClient
from specd.supervisor import Stack
from specd.v1.generation_pb2 import StopConditions
from tests.e2e.completions import PROMPT, complete
from tests.e2e.processes import PATIENCE_SECONDS, draft_of
from tests.raw_client import RawClient
from tests.security.http2 import Connection
from tests.security.rogue import coordinator_of

NUM_TOKENS = 400
LONG: dict[str, Any] = {
    **{"max_tokens": NUM_TOKENS, "num_draft_tokens": 0, "stop": StopConditions(ignore_eos=True)},
}


@asynccontextmanager
async def aging(stack: Stack, *, grace_seconds: float) -> AsyncIterator[RawClient]:
    """Run a coordinator whose connections are old after a second."""
    workers = [child.facts["address"] for child in (stack.target, draft_of(stack))]
    options = ["--connection-age-seconds", "1", "--connection-grace-seconds", str(grace_seconds)]
    async with coordinator_of(*workers, *options, "--target-timeout-seconds", "60") as (_, client, _):
        yield client


async def test_a_generation_outlasts_its_connections_age(stack: Stack, client: RawClient) -> None:
    undisturbed = await complete(client, **LONG)
    async with aging(stack, grace_seconds=PATIENCE_SECONDS) as old:
        connection = await Connection.open(old.address)
        try:
            assert await ended_with(connection) == ErrorCodes.NO_ERROR
        finally:
            connection.close()
        for _ in range(2):  # the second on another connection
            assert (await complete(old, **LONG)).token_ids == undisturbed.token_ids


async def test_what_lasts_longer_than_the_grace_is_resumed(stack: Stack, client: RawClient) -> None:
    undisturbed = await complete(client, **LONG)
    async with aging(stack, grace_seconds=1) as old, AsyncClient(old.address) as resuming:
        stream = resuming.generate(PROMPT, max_tokens=NUM_TOKENS, num_draft_tokens=0, ignore_eos=True)
        completion = await stream.completion()
    assert list(completion.token_ids) == undisturbed.token_ids
    assert completion.statistics.num_resumptions > 0


@pytest.mark.parametrize("process", ["coordinator", "draft", "target"])
async def test_who_pings_too_often_is_disconnected(stack: Stack, process: str) -> None:
    child = {"coordinator": stack.coordinator, "draft": draft_of(stack), "target": stack.target}[process]
    calm, hasty = [await Connection.open(child.facts["address"]) for _ in range(2)]
    try:
        await hasty.send_frames(*(PingFrame(0, opaque_data=bytes(8)) for _ in range(20)))
        assert await ended_with(hasty) == ErrorCodes.ENHANCE_YOUR_CALM
        for _ in range(5):
            await calm.send_frames(PingFrame(0, opaque_data=bytes(8)))
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not any(isinstance(event, PingAckReceived) for event in await calm.receive()):
                    pass
            await asyncio.sleep(0.6)
    finally:
        calm.close()
        hasty.close()


async def ended_with(connection: Connection) -> int:
    """Wait for the server's GOAWAY, and return its error code; h2 refuses what comes behind it."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            frame, length = Frame.parse_frame_header(memoryview(await connection.reader.readexactly(9)))
            frame.parse_body(memoryview(await connection.reader.readexactly(length)))
            if isinstance(frame, GoAwayFrame):
                return frame.error_code

"""Check 8: headers without end, headers that grow when they are unpacked, and more metadata than anyone needs."""

from __future__ import annotations

import asyncio

import pytest
from hyperframe.frame import ContinuationFrame, DataFrame, Frame

from specd.rpc.limits import MAX_METADATA_BYTES
from specd.supervisor import Stack
from specd.v1.generation_pb2 import GetModelInfoRequest
from tests.security.attacks import attacking
from tests.security.http2 import Connection, call_headers, encoded, headers_frame, with_length
from tests.security.standing import Standing, assert_served

MODEL_INFO = "/specd.v1.GenerationService/GetModelInfo"
OK, RESOURCE_EXHAUSTED = "0", "8"


@pytest.mark.parametrize(
    ("attack", "rate"), [("continuation_flood", 4000), ("hpack_bomb", 20), ("large_metadata", 100)]
)
async def test_others_are_served_while_headers_flood(standing: Standing, attack: str, rate: float) -> None:
    async with attacking(attack, standing.stack.address, connections=8, rate=rate, seconds=4):
        await assert_served(standing)


def call_with(metadata: list[tuple[str, str]]) -> list[Frame]:
    """Return the frames of a call with this metadata, of any size."""
    block = encoded(call_headers(MODEL_INFO, metadata))
    chunks = [block[at : at + 2**14] for at in range(0, len(block), 2**14)]
    frames: list[Frame] = [headers_frame(1, chunks[0], *(["END_HEADERS"] if len(chunks) == 1 else []))]
    frames += [
        ContinuationFrame(1, chunk, flags=["END_HEADERS"] if chunk is chunks[-1] else []) for chunk in chunks[1:]
    ]
    message = with_length(GetModelInfoRequest().SerializeToString())
    return [*frames, DataFrame(1, message, flags=["END_STREAM"])]


async def status_with(address: str, metadata: list[tuple[str, str]], *, acknowledges: bool) -> str:
    """Return the status of a call; a client that does not acknowledge the settings is not held to them by gRPC."""
    connection = await Connection.open(address)
    try:
        if acknowledges:
            await connection.receive()
            await asyncio.sleep(0.2)
        # For h2 the call is one like any other.
        connection.h2.send_headers(1, call_headers(MODEL_INFO), end_stream=True)
        connection.h2.data_to_send()
        await connection.send_frames(*call_with(metadata))
        async with asyncio.timeout(20):
            return await connection.status_of(1)
    finally:
        connection.close()


@pytest.mark.parametrize("acknowledges", [True, False])
@pytest.mark.parametrize(
    ("metadata", "status"),
    [
        ([], OK),
        ([(f"x-{number}", "v") for number in range(100)], OK),
        ([("x-large", "v" * 5000)], OK),
        ([(f"x-{number}", "v") for number in range(10_000)], RESOURCE_EXHAUSTED),
        ([("x-large", "v" * (MAX_METADATA_BYTES + 1))], RESOURCE_EXHAUSTED),
        ([("x-large", "v" * 2**20)], RESOURCE_EXHAUSTED),
    ],
    ids=["none", "100 entries", "5 kB", "10,000 entries", "more than the most", "1 MiB"],
)
async def test_metadata_is_bounded(
    stack: Stack, metadata: list[tuple[str, str]], status: str, acknowledges: bool
) -> None:
    assert await status_with(stack.address, metadata, acknowledges=acknowledges) == status


async def test_who_does_not_acknowledge_the_settings_is_disconnected(stack: Stack) -> None:
    connection = await Connection.open(stack.address)
    async with asyncio.timeout(30):
        while await connection.reader.read(2**16):  # of which h2 sees nothing
            pass
    connection.close()

"""Several generations at once, each with a noise of its own."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from gateway.generation import Increment

_READ_AHEAD = 16  # increments of all streams together that wait for the client

Indexed = tuple[int, Increment]


def seed_of(seed: int, choice: int) -> int:
    """Return the seed of a choice; the first one has the request's, and so is what a request for one choice gets."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


async def merged(streams: Sequence[AsyncGenerator[Increment]]) -> AsyncGenerator[Indexed]:
    """Yield what streams bring as it comes, each with its index; closing the iterator closes them all.

    Raises the error of the first stream that fails, which ends the others.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for increment in stream:
                yield 0, increment
        return
    queue: asyncio.Queue[Indexed | Exception | None] = asyncio.Queue(_READ_AHEAD)
    pumps = [asyncio.ensure_future(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
    num_open = len(pumps)
    try:
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int, stream: AsyncGenerator[Increment], queue: asyncio.Queue[Indexed | Exception | None]
) -> None:
    try:
        async with aclosing(stream) as increments:
            async for increment in increments:
                await queue.put((index, increment))
    except Exception as error:  # for whoever reads the queue
        await queue.put(error)
    else:
        await queue.put(None)


async def whole(increments: AsyncIterator[Indexed], count: int) -> list[list[Increment]]:
    """Return all that streams brought, by stream."""
    brought: list[list[Increment]] = [[] for _ in range(count)]
    async for index, increment in increments:
        brought[index].append(increment)
    return brought

"""Several generations at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from specd.client.events import Delta

_READ_AHEAD = 16  # deltas of all streams together that wait for the client

Indexed = tuple[int, Delta]


async def merged(streams: Sequence[AsyncGenerator[Delta]]) -> AsyncGenerator[Indexed]:
    """Yield what streams bring as it comes, each with its index; closing the iterator closes them all.

    Raises the error of the first stream that fails, which ends the others.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for delta in stream:
                yield 0, delta
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


async def _pump(index: int, stream: AsyncGenerator[Delta], queue: asyncio.Queue[Indexed | Exception | None]) -> None:
    try:
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                await queue.put((index, delta))
    except Exception as error:  # for whoever reads the queue
        await queue.put(error)
    else:
        await queue.put(None)

"""Keeps a producer going while its consumer is busy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


async def run_ahead(items: AsyncGenerator[Item], *, limit: int) -> AsyncGenerator[Item]:
    """Yield the items of a generator that goes on while an item is used, up to `limit` items ahead.

    The rounds of a session go on while the coordinator turns the last one into text and the client takes it; a client
    that stops reading stops them after `limit` rounds. Closing this generator closes the other.
    """
    queue: asyncio.Queue[Item] = asyncio.Queue(limit)

    async def produce() -> None:
        async with aclosing(items):
            async for item in items:
                await queue.put(item)

    producing = asyncio.ensure_future(produce())
    taking: asyncio.Future[Item] | None = None
    try:
        while not (producing.done() and queue.empty()):
            taking = asyncio.ensure_future(queue.get())
            await asyncio.wait({taking, producing}, return_when=asyncio.FIRST_COMPLETED)
            if taking.done():
                yield taking.result()
        producing.result()
    finally:
        producing.cancel()
        if taking is not None:
            taking.cancel()
        await asyncio.gather(producing, return_exceptions=True)

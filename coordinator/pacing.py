"""Sending at fixed intervals, so that an eavesdropper does not see the rounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")

_MOST_ITEMS = 1024  # in an interval, also for a client that does not read


async def at_intervals(items: AsyncGenerator[Item], seconds: float) -> AsyncGenerator[list[Item]]:
    """Yield the items of each interval of `seconds`, or with 0 each item at once.

    The number of tokens in a round reveals how many were looked up or drafted, and so something about the text
    (arXiv 2411.01076). An error of `items` is also raised at the end of its interval. Closing this generator closes
    `items`.
    """
    if not seconds:
        async with aclosing(items):
            async for item in items:
                yield [item]
        return
    come: list[Item] = []
    taken = asyncio.Event()

    async def collect() -> None:
        async with aclosing(items):
            async for item in items:
                come.append(item)
                if len(come) >= _MOST_ITEMS:
                    taken.clear()
                    await taken.wait()

    collecting = asyncio.ensure_future(collect())
    try:
        while come or not collecting.done():
            await asyncio.sleep(seconds)
            if come:
                batch = come.copy()
                come.clear()
                taken.set()
                yield batch
        await collecting
    finally:
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)

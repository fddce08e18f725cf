"""Sending at fixed intervals: nothing is lost, and times tell nothing of the rounds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from coordinator.pacing import at_intervals

INTERVAL = 0.05


async def numbers(pauses: list[float], error: Exception | None = None) -> AsyncGenerator[int]:
    for number, pause in enumerate(pauses):
        await asyncio.sleep(pause)
        yield number
    if error is not None:
        raise error


async def test_without_an_interval_each_item_goes_at_once() -> None:
    assert [batch async for batch in at_intervals(numbers([0, 0, 0]), 0)] == [[0], [1], [2]]


async def test_items_wait_for_the_end_of_their_interval() -> None:
    began_at = time.perf_counter()
    sent = [(batch, time.perf_counter() - began_at) async for batch in at_intervals(numbers([0.01] * 12), INTERVAL)]
    assert [number for batch, _ in sent for number in batch] == list(range(12))
    assert len(sent) <= 5
    for number, (_, at) in enumerate(sent, start=1):
        assert at >= number * INTERVAL * 0.99


async def test_an_error_comes_after_what_was_before_it() -> None:
    got: list[int] = []
    with pytest.raises(ValueError, match="no"):
        async for batch in at_intervals(numbers([0, 0], ValueError("no")), INTERVAL):
            got += batch
    assert got == [0, 1]


async def test_closing_it_closes_the_items() -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncGenerator[int]:
        try:
            while True:
                yield 1
                await asyncio.sleep(0.001)
        finally:
            closed.set()

    async with aclosing(at_intervals(endless(), INTERVAL)) as batches:
        assert await anext(batches)
    assert closed.is_set()

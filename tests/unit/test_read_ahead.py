"""Producing ahead of a slow consumer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from coordinator.round_loop import read_ahead


class Producer:
    def __init__(self, count: int, *, fail_after: int | None = None) -> None:
        self.produced = 0
        self.closed = False
        self._count = count
        self._fail_after = fail_after

    async def items(self) -> AsyncGenerator[int]:
        try:
            for i in range(self._count):
                if i == self._fail_after:
                    raise ValueError("boom")
                self.produced += 1
                yield i
                await asyncio.sleep(0)
        finally:
            self.closed = True


async def test_items_come_in_order_and_all() -> None:
    assert [i async for i in read_ahead(Producer(100).items(), limit=3)] == list(range(100))


async def test_the_producer_is_at_most_the_limit_ahead() -> None:
    producer = Producer(100)
    async for i in read_ahead(producer.items(), limit=5):
        for _ in range(20):
            await asyncio.sleep(0)
        # One is in the hands of the consumer, and one waits to enter the full queue.
        assert producer.produced <= i + 1 + 5 + 1


async def test_an_error_comes_after_what_was_produced_before() -> None:
    received = []
    with pytest.raises(ValueError, match="boom"):
        async for i in read_ahead(Producer(10, fail_after=4).items(), limit=64):
            received.append(i)  # noqa: PERF401 - the loop fails on the way
    assert received == [0, 1, 2, 3]


async def test_closing_closes_the_producer() -> None:
    producer = Producer(100)
    async with aclosing(read_ahead(producer.items(), limit=5)) as items:
        async for _ in items:
            break
    assert producer.closed
    assert producer.produced < 100

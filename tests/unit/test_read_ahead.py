"""Producing ahead of a slow consumer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from coordinator.round_loop import read_ahead
from coordinator.sessions.place import ClientPlaces, Place

PLACE = Place(ClientPlaces(0))


class Turns:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    def pause(self, place: Place) -> None:
        assert place is PLACE
        self.events.append("pause")

    async def next_round(self, place: Place) -> None:
        assert place is PLACE
        if self.events[-1:] == ["pause"]:
            await self.may_go_on.wait()
            self.events.append("go on")


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
    assert [i async for i in read_ahead(Producer(100).items(), Turns(), PLACE, limit=3)] == list(range(100))


async def test_the_producer_is_at_most_the_limit_ahead() -> None:
    producer = Producer(100)
    async for i in read_ahead(producer.items(), Turns(), PLACE, limit=5):
        for _ in range(20):
            await asyncio.sleep(0)
        # One is in the hands of the consumer, and one waits to enter the full queue.
        assert producer.produced <= i + 1 + 5 + 1


async def test_an_error_comes_after_what_was_produced_before() -> None:
    received = []
    with pytest.raises(ValueError, match="boom"):
        async for i in read_ahead(Producer(10, fail_after=4).items(), Turns(), PLACE, limit=64):
            received.append(i)  # noqa: PERF401 - the loop fails on the way
    assert received == [0, 1, 2, 3]


async def test_closing_closes_the_producer() -> None:
    producer = Producer(100)
    async with aclosing(read_ahead(producer.items(), Turns(), PLACE, limit=5)) as items:
        async for _ in items:
            break
    assert producer.closed
    assert producer.produced < 100


async def pass_time() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def test_it_pauses_when_it_is_ahead_and_goes_on_when_half_is_read_and_its_turn_has_come() -> None:
    producer, turns = Producer(100), Turns()
    turns.may_go_on.clear()
    async with aclosing(read_ahead(producer.items(), turns, PLACE, limit=10)) as items:
        assert await anext(items) == 0
        await pass_time()
        assert turns.events == ["pause"]
        ahead = producer.produced
        for _ in range(4):
            await anext(items)
            await pass_time()
        turns.may_go_on.set()
        await pass_time()
        assert turns.events == ["pause"], "less than half has been read"
        turns.may_go_on.clear()
        for _ in range(3):
            await anext(items)
        await pass_time()
        assert producer.produced == ahead, "its turn has not come"
        turns.may_go_on.set()
        await pass_time()
        assert turns.events == ["pause", "go on", "pause"]
        assert producer.produced > ahead


async def test_a_client_that_keeps_up_does_not_pause_it_before_its_end() -> None:
    turns = Turns()
    async for item in read_ahead(Producer(100).items(), turns, PLACE, limit=5):
        assert turns.events == [] or item >= 94
    assert turns.events == ["pause"]


async def test_what_has_ended_gives_its_place_to_others_however_slowly_it_is_read() -> None:
    turns = Turns()
    async with aclosing(read_ahead(Producer(4).items(), turns, PLACE, limit=5)) as items:
        await anext(items)
        await pass_time()
        assert turns.events == ["pause"]

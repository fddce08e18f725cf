"""Several choices of one request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from gateway.choices import merged
from gateway.generation import seed_of
from gateway.http.errors import ApiError
from specd.client import Delta, RoundSummary

ROUND = RoundSummary(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, {})


async def stream(name: str, length: int, closed: list[str], *, fails: bool = False) -> AsyncGenerator[Delta]:
    try:
        for i in range(length):
            await asyncio.sleep(0)
            yield Delta("", (), ROUND, f"{name}{i}")
        if fails:
            raise ApiError(503, "away", "the coordinator is away")
    finally:
        closed.append(name)


def test_choices_have_seeds_of_their_own_and_the_first_has_the_requests() -> None:
    for seed in (0, 1, 2**64 - 1):
        seeds = [seed_of(seed, choice) for choice in range(64)]
        assert seeds[0] == seed
        assert len(set(seeds)) == 64
        assert all(0 <= each < 2**64 for each in seeds)
    assert not {seed_of(1, choice) for choice in range(1, 64)} & {seed_of(2, choice) for choice in range(1, 64)}


@pytest.mark.parametrize("count", [1, 3])
async def test_all_that_streams_bring_comes_in_their_order(count: int) -> None:
    closed: list[str] = []
    streams = [stream(f"s{i}-", 40, closed) for i in range(count)]
    brought = [(i, increment.session_id) async for i, increment in merged(streams)]
    for i in range(count):
        assert [name for index, name in brought if index == i] == [f"s{i}-{n}" for n in range(40)]
    assert sorted(closed) == [f"s{i}-" for i in range(count)]


@pytest.mark.parametrize("count", [1, 3])
async def test_closing_early_closes_them_all(count: int) -> None:
    closed: list[str] = []
    increments = merged([stream(f"s{i}-", 1000, closed) for i in range(count)])
    await anext(increments)
    await increments.aclose()
    assert sorted(closed) == [f"s{i}-" for i in range(count)]


@pytest.mark.parametrize("count", [1, 3])
async def test_an_error_of_one_ends_them_all(count: int) -> None:
    closed: list[str] = []
    streams = [stream(f"s{i}-", 1000, closed) for i in range(count - 1)] + [stream("bad", 2, closed, fails=True)]
    with pytest.raises(ApiError, match="away"):
        async for _ in merged(streams):
            pass
    assert len(closed) == count

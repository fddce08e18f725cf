"""Several targets on real processes: sessions are spread, and survive the death, the stop and the return of each."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from specd.client import AsyncClient, Delta
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from tests.e2e.faults import ENVIRONMENT
from tests.e2e.processes import eventually, read_metric

PROMPTS = [f"def function_{i}(values, limit):\n    " for i in range(6)]
NAMES = ("target", "target-2")
MAX_TOKENS = 96


@pytest.fixture(scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, num_targets=2, environment=ENVIRONMENT) as running:
        yield running


async def texts_of(address: str, k: int | None = None) -> list[list[int]]:
    """Return the tokens of a generation for each prompt, all at once."""

    async def generate(client: AsyncClient, i: int) -> list[int]:
        stream = client.generate(
            PROMPTS[i],
            max_tokens=MAX_TOKENS,
            temperature=0.8,
            seed=i,
            num_draft_tokens=k,
            ignore_eos=True,
        )
        events = [event async for event in stream]
        return [token.id for event in events if isinstance(event, Delta) for token in event.tokens]

    async with AsyncClient(address) as client:
        return list(await asyncio.gather(*(generate(client, i) for i in range(len(PROMPTS)))))


def running_at(stack: Stack) -> list[float]:
    """Return the number of running sessions at each target."""
    return [read_metric(stack.coordinator, "specd_target_sessions", target=name) for name in NAMES]


async def are_ready(stack: Stack) -> None:
    """Wait until both targets are ready."""

    def ready() -> bool:
        return all(read_metric(stack.coordinator, "specd_target_ready", target=name) == 1 for name in NAMES)

    await eventually(ready)


async def while_generating(stack: Stack, happen: Callable[[], Awaitable[None]]) -> list[list[int]]:
    """Let something happen while all prompts are answered, and return the answers."""
    generating = asyncio.ensure_future(texts_of(stack.address))
    await eventually(lambda: min(running_at(stack)) > 0)
    await happen()
    return await generating


async def test_sessions_are_spread_and_the_texts_are_those_of_the_target_alone(stack: Stack) -> None:
    alone = await texts_of(stack.address, k=0)
    most = [0.0, 0.0]

    async def watch() -> None:
        for _ in range(20):
            most[:] = map(max, most, running_at(stack))
            await asyncio.sleep(0.02)

    assert await while_generating(stack, watch) == alone
    assert min(most) >= 2, most


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_sessions_move_when_a_target_dies_or_stops(stack: Stack, number: int, how: signal.Signals) -> None:
    await are_ready(stack)
    alone = await texts_of(stack.address, k=0)
    moves = read_metric(stack.coordinator, "specd_session_moves_total")

    async def end() -> None:
        os.kill(stack.targets[number].pid, how)

    assert await while_generating(stack, end) == alone
    assert read_metric(stack.coordinator, "specd_session_moves_total") > moves
    await are_ready(stack)


async def test_a_target_that_stops_hands_its_sessions_over_before_it_ends(stack: Stack) -> None:
    """A rolling update: one after the other stops and comes back, and no session is lost and sent again late."""
    await are_ready(stack)
    alone = await texts_of(stack.address, k=0)
    for target in stack.targets:

        async def stop() -> None:
            os.kill(target.pid, signal.SIGTERM)  # noqa: B023 - called within this turn

        assert await while_generating(stack, stop) == alone
        await are_ready(stack)

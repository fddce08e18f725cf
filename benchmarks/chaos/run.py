"""Phases of a run: requests of several sessions at once, while something is harmed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial

from benchmarks.chaos.faults import Faults
from benchmarks.chaos.requests import Answer, Request, ask, ask_patiently
from benchmarks.chaos.tally import Tally, counted
from specd.client import AsyncClient, Delta
from specd.errors import SpecdError
from specd.supervisor import Stack
from tests.e2e.faults import scrape

_LONGEST_PAUSE_SECONDS = 0.5  # between two faults

Ask = Callable[[Request, Callable[[], None]], Awaitable[Answer]]


class Run:
    """A stack, requests, and the texts of all of them undisturbed."""

    def __init__(self, stack: Stack, requests: list[Request], rng: random.Random, num_sessions: int) -> None:
        self.stack, self.requests = stack, requests
        self._rng, self._num_sessions = rng, num_sessions
        self._expected: dict[Request, list[int]] = {}

    async def learn(self, client: AsyncClient) -> None:
        """Ask everything once."""
        for request in self.requests:
            self._expected[request] = (await ask(client, request)).token_ids

    async def undisturbed(self, client: AsyncClient, seconds: float) -> Tally:
        """Return what comes of requests while nothing is harmed, to compare with."""
        return await self._while_asking(partial(ask, client), lambda _: asyncio.sleep(seconds))

    async def while_harmed(self, client: AsyncClient, faults: Faults, num_faults: int) -> Tally:
        """Return the outcome of requests while a worker has this number of faults."""
        before = await counted(self.stack.coordinator)
        tally = await self._while_asking(partial(ask, client), partial(self._harm, faults, num_faults))
        if not tally.failed:
            after = await counted(self.stack.coordinator)
            assert after - before == tally.sums, (after - before, tally.sums)
        return tally

    async def while_restarted(self, client: AsyncClient, faults: Faults, num_faults: int) -> Tally:
        """Return the outcome of clients that resume, while the coordinator has this number of faults."""
        return await self._while_asking(partial(ask_patiently, client), partial(self._harm, faults, num_faults))

    async def ask(self, how: Ask, request: Request, tally: Tally) -> None:
        """Ask once, and count what comes of it."""
        try:
            tally.add(await how(request, tally.moved.set), self._expected[request])
        except SpecdError as error:
            tally.failed[error.reason] += 1

    async def abandon(self, client: AsyncClient) -> float:
        """Go away in the middle of an answer; return the seconds until the workers hold nothing of it."""
        most = self._rng.randint(1, 8)
        num_answers = 0
        async with client.generate(self._rng.choice(self.requests).turns[0], max_tokens=96, ignore_eos=True) as stream:
            async for event in stream:
                num_answers += isinstance(event, Delta)
                if num_answers == most:
                    break
        gone_at = time.perf_counter()
        for child in self.stack.children[1:]:
            while (await scrape(child))["specd_worker_active_sessions"]:  # noqa: ASYNC110 - of other processes
                await asyncio.sleep(0.002)
        return time.perf_counter() - gone_at

    async def _while_asking(self, how: Ask, until: Callable[[Tally], Awaitable[None]]) -> Tally:
        tally, done = Tally(), asyncio.Event()

        async def keep_asking() -> None:
            while not done.is_set():
                await self.ask(how, self._rng.choice(self.requests), tally)

        asking = [asyncio.ensure_future(keep_asking()) for _ in range(self._num_sessions)]
        await until(tally)
        done.set()
        await asyncio.gather(*asking)
        return tally

    async def _harm(self, faults: Faults, num_faults: int, tally: Tally) -> None:
        for _ in range(num_faults):
            await asyncio.sleep(self._rng.uniform(0.0, _LONGEST_PAUSE_SECONDS))
            tally.faults[await faults.harm()] += 1
            tally.moved.clear()  # a round that is lost five times in a row fails, and is meant to
            await tally.moved.wait()

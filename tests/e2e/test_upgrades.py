"""Processes that are replaced one after the other, as for an upgrade, while clients generate."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from specd import AsyncClient
from specd.child import Child
from specd.client import Retrying, RetryPolicy
from specd.errors import SpecdError
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from tests.e2e.faults import ENVIRONMENT, SEED, is_whole
from tests.e2e.faults import eventually as eventually_async
from tests.e2e.processes import PATIENCE_SECONDS, draft_of

PROMPTS = ("class Stack:\n    def", "def fibonacci(n):", "import os\n\n\ndef walk(")

# A busy machine takes long to start a process.
_RETRIES = RetryPolicy(patience_seconds=PATIENCE_SECONDS)


class Load:
    """Clients that ask for the same texts over and over, and compare them with the first ones."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._expected: dict[int, list[int]] = {}
        self._ending = asyncio.Event()
        self.num_right = 0
        self.errors: list[SpecdError] = []  # that clients were told, and retried after

    async def begin(self) -> None:
        """Ask for each text once."""
        for number in range(len(PROMPTS)):
            self._expected[number] = await self._ask(number)
        assert not self.errors

    async def keep_asking(self, number: int) -> None:
        """Ask until the end."""
        while not self._ending.is_set():
            assert await self._ask(number) == self._expected[number]
            self.num_right += 1

    async def some_more(self) -> None:
        """Wait until each client has had further texts, one of which began after this call."""
        enough = self.num_right + 2 * len(PROMPTS)
        while self.num_right < enough:  # noqa: ASYNC110 - any of the clients ends
            await asyncio.sleep(0.02)

    def end(self) -> None:
        """Let the clients finish their texts and end."""
        self._ending.set()

    async def _ask(self, number: int) -> list[int]:
        token_ids: list[int] = []
        stream = self._client.generate(
            PROMPTS[number], max_tokens=48, temperature=0.8 * (number % 2), seed=SEED, ignore_eos=True
        )
        async for event in stream:
            if isinstance(event, Retrying):
                self.errors.append(event.error)
        token_ids += [token.id for token in stream.tokens]
        return token_ids


@pytest.fixture(scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=ENVIRONMENT) as running:
        yield running


async def replace(child: Child, stack: Stack) -> None:
    """End a process as an upgrade does, and wait for the next one."""
    pid = child.pid
    os.kill(pid, signal.SIGTERM)

    async def is_replaced() -> bool:
        return child.pid != pid and await is_whole(stack)

    await eventually_async(is_replaced)


@pytest.mark.thorough
async def test_any_process_can_be_replaced_under_load(stack: Stack) -> None:
    async with AsyncClient(stack.address, retries=_RETRIES) as client, asyncio.TaskGroup() as clients:
        load = Load(client)
        await load.begin()
        for number in range(len(PROMPTS)):
            clients.create_task(load.keep_asking(number))
        for child in (draft_of(stack), stack.target, stack.coordinator):
            await load.some_more()
            await replace(child, stack)
        await load.some_more()
        load.end()


@pytest.mark.thorough
async def test_with_a_second_coordinator_none_of_them_is_missed(stack: Stack) -> None:
    """Clients with both addresses go to the other one, at once."""
    command = list(stack.coordinator.command)
    command[command.index("--listen") + 1] = "127.0.0.1:0"
    other = Child("coordinator", command, ENVIRONMENT)
    await other.start()
    other.keep_address()
    watching = asyncio.create_task(other.run())
    both = f"ipv4:{stack.address},{other.facts['address']}"
    try:
        async with AsyncClient(both, retries=_RETRIES) as client, asyncio.TaskGroup() as clients:
            load = Load(client)
            await load.begin()
            for number in range(len(PROMPTS)):
                clients.create_task(load.keep_asking(number))
            for child in (stack.coordinator, other):
                await load.some_more()
                await replace(child, stack)
            await load.some_more()
            load.end()
        # gRPC itself cancels a call that comes in the moment in which a server closes.
        assert not [error for error in load.errors if error.reason not in {"STOPPING", "CANCELLED"}], load.errors
    finally:
        watching.cancel()
        await other.stop()

"""The clock jumps by a day, to and fro, while processes generate and keep sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.v1.generation_pb2 import StopConditions
from specd.v1.sampling_pb2 import SamplingParameters
from tests.e2e.completions import PROMPT, complete
from tests.e2e.processes import PATIENCE_SECONDS
from tests.raw_client import RawClient
from tests.thorough import examples

# Debian's package libfaketime: it stands between a process and its clock, and reads what to add from a file.
_LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
pytestmark = pytest.mark.skipif(_LIBRARY is None, reason="there is no libfaketime")


class Clock:
    """The clock of the processes, ahead of this one's by some days."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0)

    def set(self, days: int) -> None:
        """Let it jump."""
        self._file.write_text(f"{days:+d}d\n")

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which a process reads this clock. The monotonic clock stays as it is."""
        return {
            "LD_PRELOAD": str(_LIBRARY),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }


@pytest.fixture(scope="module")
async def jumping(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[RawClient, Clock]]:
    """A client of a stack, and the clock of the stack."""
    clock = Clock(tmp_path_factory.mktemp("clock") / "days")
    async with (
        Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=clock.environment) as stack,
        RawClient(stack.address) as client,
    ):
        yield client, clock


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", examples([1, 0], 1))
async def test_texts_are_the_same(jumping: tuple[RawClient, Clock], temperature: int) -> None:
    client, clock = jumping
    fields: dict[str, Any] = {
        "sampling": SamplingParameters(temperature=temperature, seed=5),
        "max_tokens": 120,
        "stop": StopConditions(ignore_eos=True),
    }
    undisturbed = await complete(client, **fields)
    tokens: list[int] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        async for response in client.generate(PROMPT, **fields):
            tokens += [token.id for token in response.tokens]
            clock.set([1, 0, -1, 400][len(tokens) % 4])
    clock.set(0)
    assert tokens == undisturbed.token_ids
    assert (await complete(client, **fields)).token_ids == undisturbed.token_ids


@pytest.mark.parametrize("days", [-1, 1])
async def test_a_session_is_kept_over_a_jump(jumping: tuple[RawClient, Clock], days: int) -> None:
    client, clock = jumping
    texts = []
    for jump in (0, days):
        first = await complete(client, max_tokens=8)
        clock.set(jump)
        second = await complete(client, "\n", session_id=first.last.session_id, max_tokens=8)
        clock.set(0)
        texts.append(first.text + second.text)
    assert texts[0] == texts[1]

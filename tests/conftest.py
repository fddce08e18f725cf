"""What the tests share: prompts, models made on the spot, and running stacks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from specd.client import Client
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.worker.blas import load_blas

# Before any test imports MLX.
load_blas(num_threads=2)

PROMPTS = sorted((Path(__file__).parents[1] / "benchmarks" / "prompts").glob("*.py"))


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """The code prompts: 16 short ones, 4 of 500 tokens and more, 4 of 1500 and more."""
    return [path.read_text() for path in PROMPTS]


@pytest.fixture(scope="session")
async def stack() -> AsyncIterator[Stack]:
    """The three processes on the embedded pair, for tests that leave them as they found them."""
    async with Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT) as running:
        yield running


@pytest.fixture(scope="session")
async def client(stack: Stack) -> AsyncIterator[Client]:
    """A client of `stack`."""
    async with Client(stack.address) as connected:
        yield connected

"""A running stack, and the promise that an attack leaves it as it was."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from tests.e2e.processes import start_specd
from tests.raw_client import RawClient
from tests.security.http_door import HttpDoor
from tests.security.standing import Standing, standard_error_to, standing_of


@pytest.fixture(scope="session")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of the processes of `stack`."""
    return tmp_path_factory.mktemp("logs") / "log"


@pytest.fixture(scope="session")
async def stack(log_file: Path) -> AsyncIterator[Stack]:
    """The three processes on the embedded pair, the coordinator on TCP."""
    environment = {"OPENBLAS_NUM_THREADS": "1", "SPECD_LOG_FORMAT": "json"}
    stack = Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=environment)
    with standard_error_to(log_file):
        await stack.__aenter__()
    try:
        yield stack
    finally:
        await stack.__aexit__()


@pytest.fixture(scope="session")
async def client(stack: Stack) -> AsyncIterator[RawClient]:
    """A well-behaved client of `stack`."""
    async with RawClient(stack.address) as connected:
        yield connected


@pytest.fixture
async def standing(stack: Stack, client: RawClient, log_file: Path) -> AsyncIterator[Standing]:
    """The processes before an attack; afterwards they are the same, at rest, and have logged no error of their own."""
    before = await standing_of(stack, client, log_file)
    yield before
    await before.assert_kept()


@pytest.fixture(scope="session")
async def http_door() -> AsyncIterator[HttpDoor]:
    """A gateway by itself: what it refuses, it refuses without a coordinator."""
    async with start_specd(
        "gateway", "--listen", "127.0.0.1:0", "--coordinator", "127.0.0.1:1", SPECD_LOG_FORMAT="json"
    ) as running:
        ready = await running.next_event("ready")
        yield HttpDoor(ready["address"])

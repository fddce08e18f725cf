"""Check 22: few open files, a full disk, and processes that stand still."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from tests.e2e.completions import complete
from tests.e2e.processes import PATIENCE_SECONDS, draft_of, read_metrics_text
from tests.raw_client import RawClient
from tests.security.http2 import connect
from tests.security.standing import Standing, standard_error_to

ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "SPECD_LOG_FORMAT": "json"}


@contextlib.contextmanager
def limited(what: int, value: int) -> Iterator[None]:
    """Limit a resource of the processes that are started within the context."""
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


async def test_connections_do_not_take_the_last_files(standing: Standing, tmp_path: Path) -> None:
    stack = Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=ENVIRONMENT)
    with standard_error_to(tmp_path / "log"), limited(resource.RLIMIT_NOFILE, 96):
        await stack.__aenter__()
    try:
        pids = [child.pid for child in stack.children]
        async with RawClient(stack.address) as client:
            await complete(client)
            streams = [await connect(stack.address) for _ in range(150)]
            assert (await complete(client)).token_ids == standing.token_ids
            # Files are left for the process itself, such as for a scrape.
            text = await asyncio.wait_for(asyncio.to_thread(read_metrics_text, stack.coordinator), PATIENCE_SECONDS)
            assert "specd_active_sessions" in text
            for _, writer in streams:
                writer.transport.abort()
        await asyncio.sleep(1)
        async with RawClient(stack.address) as newcomer:
            assert (await complete(newcomer)).token_ids == standing.token_ids
        assert [child.pid for child in stack.children] == pids
    finally:
        await stack.__aexit__()


async def test_a_full_disk_costs_no_more_than_what_is_kept_there(standing: Standing, tmp_path: Path) -> None:
    """No file of the processes can be longer than 100 bytes: neither the log nor what is kept between starts."""
    cache = tmp_path / "cache"
    environment = {**ENVIRONMENT, "XDG_CACHE_HOME": str(cache)}
    stack = Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=environment)
    with standard_error_to(tmp_path / "log"), limited(resource.RLIMIT_FSIZE, 100):
        await stack.__aenter__()
    try:
        async with RawClient(stack.address) as client:
            assert (await complete(client)).token_ids == standing.token_ids
    finally:
        await stack.__aexit__()


@pytest.mark.parametrize("which", ["draft", "target", "coordinator"])
async def test_a_process_that_stands_still_for_a_while_goes_on(standing: Standing, which: str) -> None:
    stack = standing.stack
    child = {"draft": draft_of(stack), "target": stack.target, "coordinator": stack.coordinator}[which]
    running = asyncio.ensure_future(complete(standing.client))
    await asyncio.sleep(0.1)
    os.kill(child.pid, signal.SIGSTOP)
    await asyncio.sleep(2.5)  # longer than a round waits for a draft
    os.kill(child.pid, signal.SIGCONT)
    assert (await running).token_ids == standing.token_ids

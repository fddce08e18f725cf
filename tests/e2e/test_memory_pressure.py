"""A target worker with memory that its system limits: it frees memory, and no text is lost."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from benchmarks.chaos.faults import reached_by_wires
from benchmarks.wire_faults import Wire
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.v1.generation_pb2 import DRAFT_SOURCE_NONE, StopConditions
from tests.e2e.completions import PROMPT, Completion, complete
from tests.e2e.processes import eventually, read_metric
from tests.raw_client import RawClient

_MIB = 2**20
_RESERVE = 256 * _MIB
_MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


class MemoryGroup:
    """A memory cgroup (v1) with one process."""

    def __init__(self, path: Path, pid: int) -> None:
        self._path = path
        path.mkdir()
        (path / "cgroup.procs").write_text(str(pid))

    def leave(self, num_bytes: int) -> None:
        """Limit the process to its present memory and this number of bytes."""
        used = int((self._path / "memory.usage_in_bytes").read_text())
        (self._path / "memory.limit_in_bytes").write_text(str(used + num_bytes))

    def lift(self) -> None:
        """Take the limit away."""
        (self._path / "memory.limit_in_bytes").write_text("-1")


@pytest.fixture
async def wires() -> dict[str, Wire]:
    return {}


@pytest.fixture
async def stack(wires: dict[str, Wire]) -> AsyncIterator[Stack]:
    environment = {"SPECD_TARGET_WORKER_MEMORY_RESERVE_BYTES": str(_RESERVE)}
    running = Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=environment)
    async with reached_by_wires(running) as made, running:
        wires.update(made)
        yield running


@pytest.fixture
def group(stack: Stack) -> Iterator[MemoryGroup]:
    path = _MEMORY_GROUPS / f"specd-test-{os.getpid()}"
    try:
        group = MemoryGroup(path, stack.target.pid)
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield group
    group.lift()
    (_MEMORY_GROUPS / "cgroup.procs").write_text(str(stack.target.pid))
    path.rmdir()


@pytest.mark.thorough
async def test_memory_that_runs_out_costs_prefixes_then_time_and_no_token(
    stack: Stack, wires: dict[str, Wire], group: MemoryGroup
) -> None:
    def sessions_of_target() -> float:
        return read_metric(stack.target, "specd_worker_active_sessions")

    def prefixes_of_target() -> float:
        return read_metric(stack.target, "specd_worker_prefix_cache_entries")

    async with RawClient(stack.address) as client:

        async def long() -> Completion:
            stop = StopConditions(ignore_eos=True)
            return await complete(client, PROMPT, max_tokens=300, draft_source=DRAFT_SOURCE_NONE, stop=stop)

        undisturbed = await long()
        await eventually(lambda: prefixes_of_target() > 0)
        wires["target"].delay_seconds = 0.025  # so that it takes 15 seconds at least
        running = asyncio.create_task(long())
        await eventually(lambda: sessions_of_target() == 1)
        group.leave(_RESERVE - 8 * _MIB)
        await eventually(lambda: prefixes_of_target() == 0)
        group.leave(_RESERVE * 3 // 4)
        await asyncio.sleep(3)  # looks come every second
        other = asyncio.create_task(complete(client, "class Stack:", max_tokens=16))
        await asyncio.sleep(1)
        assert not other.done()
        assert not running.done()
        assert sessions_of_target() >= 1
        group.leave(_RESERVE // 4)
        await eventually(lambda: sessions_of_target() == 0)
        assert not running.done()
        group.lift()
        wires["target"].delay_seconds = 0.0
        assert (await running).token_ids == undisturbed.token_ids
        assert len((await other).token_ids) == 16

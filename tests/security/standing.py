"""The state that an attack must not change: processes, memory, sessions, answers and a log without surprises."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specd.supervisor import Stack
from tests.e2e.completions import complete
from tests.e2e.processes import resident_mib, wait_until_idle
from tests.raw_client import RawClient

# What a process may have grown by when an attack is over: allocators keep what was needed at once.
MOST_GROWTH_MIB = 256
# Lines that one attack may bring into the log: what is logged of each kind is limited to 10 in 10 seconds.
MOST_LINES = 2000
# gRPC's core writes lines of its own, such as "E1120 08:13:06.841855 9641 chttp2_transport.cc:83] ...".
CORE_LINE = re.compile(r"[IWE]\d{4} ")


@contextlib.contextmanager
def standard_error_to(path: Path) -> Iterator[None]:
    """Make processes that are started within the context write their standard error to a file."""
    saved = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)


@dataclass(frozen=True)
class Standing:
    """The processes of a stack at rest."""

    stack: Stack
    client: RawClient
    log: Path
    pids: list[int]
    memory_mib: list[float]
    token_ids: list[int]
    log_bytes: int

    def new_log_lines(self) -> list[str]:
        """Return what was logged since."""
        with self.log.open("rb") as file:
            file.seek(self.log_bytes)
            return file.read().decode(errors="replace").splitlines()

    def growth_mib(self) -> list[float]:
        """Return by how much each process has grown since."""
        return [
            resident_mib(child.pid) - before for child, before in zip(self.stack.children, self.memory_mib, strict=True)
        ]

    async def assert_kept(self) -> None:
        """All is as it was: the same processes, no session left, the same answer, little memory, no bug in the log."""
        await wait_until_idle(self.stack)
        completion = await complete(self.client)
        assert completion.token_ids == self.token_ids
        assert [child.pid for child in self.stack.children] == self.pids
        assert max(self.growth_mib()) < MOST_GROWTH_MIB
        lines = self.new_log_lines()
        assert len(lines) < MOST_LINES
        for line in lines:
            assert is_expected(line), line[:3000]


def is_expected(line: str) -> bool:
    """Return whether a line of a log is an event without a traceback and without our own INTERNAL."""
    if CORE_LINE.match(line):
        return True
    entry = json.loads(line) if line.startswith("{") else {}
    return bool(entry) and "exception" not in entry and entry.get("reason") != "INTERNAL"


async def standing_of(stack: Stack, client: RawClient, log: Path) -> Standing:
    """Return how the processes are now, after one completion."""
    await wait_until_idle(stack)
    completion = await complete(client)
    await wait_until_idle(stack)
    return Standing(
        stack,
        client,
        log,
        pids=[child.pid for child in stack.children],
        memory_mib=[resident_mib(child.pid) for child in stack.children],
        token_ids=completion.token_ids,
        log_bytes=log.stat().st_size,  # noqa: ASYNC240
    )


async def assert_served(standing: Standing, *, num_times: int = 2, seconds: float = 60) -> None:
    """Under attack, completions come with the same tokens, and a new connection is served like an old one."""
    async with asyncio.timeout(seconds):
        for _ in range(num_times):
            assert (await complete(standing.client)).token_ids == standing.token_ids
        async with RawClient(standing.stack.address) as newcomer:
            assert (await complete(newcomer)).token_ids == standing.token_ids

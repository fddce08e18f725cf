"""Faults of processes and of the wires between them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
from collections.abc import AsyncIterator

from benchmarks.wire_faults import Wire
from specd.child import Child
from specd.supervisor import Stack
from tests.e2e.faults import is_whole

_LONGEST_SECONDS = 2.0  # of a fault that passes
_DELAY_SECONDS = 0.05
# The frequency of each fault. A process that restarts takes a core for seconds, so few faults are restarts.
_OF_WORKERS = {"kill": 1, "drain": 1, "stop": 1, "cut": 4, "hold": 4, "delay": 2}
_OF_COORDINATOR = {"kill": 2, "drain": 2, "stop": 1}
_ON_LINUX = {"descriptors": 1}


@contextlib.asynccontextmanager
async def reached_by_wires(stack: Stack) -> AsyncIterator[dict[str, Wire]]:
    """Put a wire between the coordinator of a stack that has not started and each worker."""
    command = stack.coordinator.command
    async with contextlib.AsyncExitStack() as running:
        wires = {}
        for worker in ("target", "draft"):
            place = command.index(f"--{worker}") + 1
            path = command[place].removeprefix("unix:")
            wires[worker] = await running.enter_async_context(Wire(f"{path}-wire", path))
            command[place] = f"unix:{path}-wire"
        yield wires


class Faults:
    """Harms one process of a stack, or its wire if it has one, in ways that a seed chooses."""

    def __init__(self, stack: Stack, name: str, wire: Wire | None, rng: random.Random) -> None:
        """`name` is `draft`, `target` or `coordinator`."""
        child = getattr(stack, name)
        assert isinstance(child, Child)
        self._stack, self._child, self._wire, self._rng = stack, child, wire, rng
        self._kinds = _OF_COORDINATOR if wire is None else _OF_WORKERS
        if hasattr(resource, "prlimit"):
            self._kinds = self._kinds | _ON_LINUX

    async def harm(self) -> str:
        """Do one kind of harm; return its name once it is over and the process can be reached again.

        `kill` is SIGKILL, as of a system that is out of memory; `drain` SIGTERM, as of an upgrade; `stop` SIGSTOP.
        `cut` ends all connections of the wire, `hold` lets nothing through (half-open), `delay` makes it long.
        `descriptors` lets the process open nothing more.
        """
        kind = self._rng.choices(list(self._kinds), list(self._kinds.values()))[0]
        seconds = self._rng.uniform(0.05, _LONGEST_SECONDS)
        if kind in ("kill", "drain"):
            await self._end(signal.SIGKILL if kind == "kill" else signal.SIGTERM)
        elif kind == "stop":
            os.kill(self._child.pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            os.kill(self._child.pid, signal.SIGCONT)
        elif kind == "descriptors":
            await self._exhaust_descriptors(seconds)
        else:
            assert self._wire is not None
            await self._harm_wire(self._wire, kind, seconds)
        return kind

    async def _end(self, number: signal.Signals) -> None:
        """Send a signal, and wait until the supervisor has restarted the process and all is well."""
        pid = self._child.pid
        os.kill(pid, number)
        while self._child.pid == pid or not await is_whole(self._stack):  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.05)

    async def _exhaust_descriptors(self, seconds: float) -> None:
        pid = self._child.pid
        usual = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        num_open = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - pathlib may not be called here
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_open, usual[1]))
        await asyncio.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):  # it may have ended by that
            resource.prlimit(pid, resource.RLIMIT_NOFILE, usual)

    async def _harm_wire(self, wire: Wire, kind: str, seconds: float) -> None:
        if kind == "cut":
            await wire.cut()
        elif kind == "hold":
            await wire.hold(seconds)
        else:
            wire.delay_seconds = _DELAY_SECONDS
            await asyncio.sleep(seconds)
            wire.delay_seconds = 0.0

"""Stacks that cannot run ahead of a test."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from benchmarks.chaos.faults import reached_by_wires
from specd.supervisor import Stack


@contextlib.asynccontextmanager
async def at_the_pace_of_tests(stack: Stack) -> AsyncIterator[Stack]:
    """Run a stack whose workers are reached through this event loop.

    A coordinator may be 64 rounds ahead of its client. If the machine gave a test no time, a kill in round 10 would
    come when the text is done. This way, rounds wait for the test: after half a second, none has gone ahead.
    """
    async with reached_by_wires(stack), stack:
        yield stack

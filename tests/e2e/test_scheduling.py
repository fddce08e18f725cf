"""What computes does not take a core from what answers."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

from specd.cli.supervisor import Child, Stack
from tests.e2e.processes import draft_of


@pytest.mark.skipif(sys.platform != "linux", reason="the policy is Linux's")
async def test_workers_on_the_cpu_are_scheduled_in_batches_and_the_coordinator_is_not(stack: Stack) -> None:
    def policies(child: Child) -> set[int]:
        found = set()
        for thread in Path(f"/proc/{child.pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                found.add(os.sched_getscheduler(int(thread.name)))
        return found

    assert policies(stack.target) == policies(draft_of(stack)) == {os.SCHED_BATCH}
    assert policies(stack.coordinator) == {os.SCHED_OTHER}

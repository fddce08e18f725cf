"""Computing processes do not take a core from answering ones."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specd.child import Child
from specd.supervisor import Stack
from tests.e2e.processes import draft_of


@pytest.mark.skipif(sys.platform != "linux", reason="the policy is Linux's")
async def test_workers_on_the_cpu_are_scheduled_in_batches_and_the_coordinator_is_not(stack: Stack) -> None:
    def policies(child: Child) -> set[int]:
        found = set()
        for thread in Path(f"/proc/{child.pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                found.add(os.sched_getscheduler(int(thread.name)))
        return found

    own = os.sched_getscheduler(0)
    if own != os.SCHED_OTHER or not may_be_scheduled_in_batches():
        pytest.skip("a policy is chosen, or none may be")
    assert policies(stack.target) == policies(draft_of(stack)) == {os.SCHED_BATCH}
    assert policies(stack.coordinator) == {own}


def may_be_scheduled_in_batches() -> bool:
    """Return whether the system lets a process choose this policy."""
    choose = "import os; os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))"
    return subprocess.run([sys.executable, "-c", choose], check=False).returncode == 0

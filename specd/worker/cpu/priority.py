"""How the system schedules a process that computes with all cores."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def let_others_go_first() -> None:
    """Let the coordinator and clients on the same machine run as soon as they can; on Linux.

    They need a tenth of a core, but many times a round, and BLAS's threads, which wake for each product, would take it
    from them each time. Threads that are scheduled in batches do not (sched(7), SCHED_BATCH). Their share stays theirs.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended, or has been given a policy of its own
            os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))

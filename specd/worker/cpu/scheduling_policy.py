"""The system's scheduling policy for a process that computes with all cores."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def schedule_in_batches() -> None:
    """Let the threads of this process, and those that they start, not preempt other processes; on Linux.

    The coordinator and clients on the same machine run for a tenth of the time, but many times a round. BLAS's threads
    wake for each product, and would take the core from them each time. Under SCHED_BATCH (sched(7)) they wait until it
    is free. Their share of the time stays the same. A policy that someone has chosen stays.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    with contextlib.suppress(OSError):  # there is no /proc, or a sandbox does not allow it
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))

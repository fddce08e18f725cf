"""The system's scheduling policy for a process that computes with all cores."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def schedule_in_batches() -> None:
    """Keep the threads of this process, and the threads that they start, from preempting other processes; on Linux.

    The coordinator and clients on the same machine run for a tenth of the time, but many times a round. BLAS's threads
    wake for each product, and would take the core from them each time. Under SCHED_BATCH (sched(7)) BLAS's threads wait
    until the core is free, and keep their share of the time. A policy that the user has set stays. A niceness of 10
    would help the coordinator more, but starve the workers beside any other process that computes.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    with contextlib.suppress(OSError):  # there is no /proc, or a sandbox does not allow it
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # the thread has ended
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))

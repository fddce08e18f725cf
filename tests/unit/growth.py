"""The growth of the time of some work with its size."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def growth(work: Callable[[int], object], size: int, factor: int = 4) -> float:
    """Return how many times as long `work(factor * size)` takes as `work(size)`: `factor` where it is linear.

    The time is that of this thread alone, without collections of garbage, and the least of several: what else the
    machine does is not in it.
    """
    return _least_seconds(work, factor * size) / _least_seconds(work, size)


def _least_seconds(work: Callable[[int], object], size: int) -> float:
    times = []
    for _ in range(5):
        gc.disable()
        try:
            started_at = time.thread_time()
            work(size)
            times.append(time.thread_time() - started_at)
        finally:
            gc.enable()
    return max(min(times), 1e-9)

"""The judgement whether a process keeps growing, by readings of its memory."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

# With fewer readings, one could decide.
FEWEST_READINGS = 12


def lasting_growth(readings: Sequence[float]) -> float:
    """Return by how much the readings of a process have grown, taken after equal amounts of work.

    In the first quarter it grows to its size. In the rest, the median of the last third is compared with that of the
    first: a process's memory goes up and down by some 25 MiB as the allocator returns pages, and one reading that is
    low or high decides nothing.
    """
    assert len(readings) >= FEWEST_READINGS
    settled = readings[len(readings) // 4 :]
    third = len(settled) // 3
    return median(settled[-third:]) - median(settled[:third])

"""A long run, and the memory of each process."""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.chaos.requests import ask
from benchmarks.chaos.run import Run
from benchmarks.chaos.tally import Tally, counted
from specd.client import AsyncClient
from tests.e2e.processes import own_memory_mib

# The first part of the run: caches fill, and what is learnt comes in.
_WARM_UP = 1 / 3


async def soak(run: Run, client: AsyncClient, seconds: float, num_sessions: int) -> dict[str, Any]:
    """Return texts and memory of a long run of `num_sessions` clients, each of which rests for a fifth of its time."""
    tally, began_at = Tally(), time.monotonic()
    before = await counted(run.stack.coordinator)
    rng = random.Random(0)

    async def keep_asking() -> None:
        while time.monotonic() < began_at + seconds:
            asked_at = time.monotonic()
            await run.ask(partial(ask, client), rng.choice(run.requests), tally)
            await asyncio.sleep((time.monotonic() - asked_at) / 4)

    asking = [asyncio.ensure_future(keep_asking()) for _ in range(num_sessions)]
    curve = []
    while time.monotonic() < began_at + seconds:
        memory = {child.name: own_memory_mib(child.pid) for child in run.stack.children}
        curve.append({"at": time.monotonic() - began_at, **memory})
        await asyncio.sleep(min(10.0, seconds / 20))
    await asyncio.gather(*asking)
    after = await counted(run.stack.coordinator)
    return {**tally.record(), "counters_are_the_sums": after - before == tally.sums, **growth(curve)}


def growth(curve: list[dict[str, float]]) -> dict[str, Any]:
    """Return how the memory of each process grew: a line through it after the warm-up, and the most of each third.

    A worker's memory goes up and down with the caches that it holds, which hides a line of a few MiB.
    """
    names = [name for name in curve[0] if name != "at"]
    settled = [point for point in curve if point["at"] >= _WARM_UP * curve[-1]["at"]]
    hours = [point["at"] / 3600 for point in settled]
    thirds = [curve[len(curve) * i // 3 : len(curve) * (i + 1) // 3] for i in range(3)]
    return {
        "growth_mib_per_hour": {
            name: float(np.polyfit(hours, [point[name] for point in settled], 1)[0]) for name in names
        },
        "most_mib_of_each_third": {name: [max(point[name] for point in third) for third in thirds] for name in names},
        "memory_mib": curve,
    }


def plot(record: dict[str, Any], path: Path) -> None:
    """Draw the memory of each process over time. Needs the extra `plot`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    curve = record["memory_mib"]
    for name in record["growth_mib_per_hour"]:
        axes.plot([point["at"] / 60 for point in curve], [point[name] for point in curve], label=name)
    axes.set(xlabel="minutes", ylabel="memory of its own, MiB", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)

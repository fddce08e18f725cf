"""Runs the jobs of a worker without an engine."""

from __future__ import annotations

from typing import Any

from specd.worker.engine import Result, Steps


def finish(steps: Steps[Result]) -> Result:
    """Run a job to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def run_some(steps: Steps[Any], num_steps: int) -> None:
    """Run a job and drop it, as when a newer request supersedes it."""
    for _ in range(num_steps):
        if next(steps, "done") == "done":
            return
    steps.close()

"""Runs the jobs of a worker without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from specd.cache_footprint import CacheFootprint
from specd.step_costs import StepCosts
from specd.worker.engine.forward import forward
from specd.worker.engine.jobs import EarlyResult, Encode, Evaluate, Feed, FirstResult, Result, Steps
from specd.worker.engine.prefill_chunk import PrefillChunk
from specd.worker.model.loader import LoadedModel
from specd.worker.session.capacity import CacheCapacity
from specd.worker.session.prefix_cache import PrefixCache
from specd.worker.session.session_cache import SessionCache
from specd.worker.session.stream import Worker


class Chunks(PrefillChunk):
    """Chunks with a constant number of tokens, for any time that they take."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(1.0)
        self._fixed = num_tokens

    @property
    def num_tokens(self) -> int:
        return self._fixed


class Driven:
    """A job, a step at a time: the forward pass over what it wants to feed, and what it makes of the logits."""

    def __init__(self, steps: Steps[Any]) -> None:
        self._steps = steps
        self._wants: Feed | Encode | None = None
        self.has_ended = False
        self.result: Any = None
        self._send(None)

    def step(self) -> None:
        self.step_together([self])

    @staticmethod
    def step_together(jobs: Sequence[Driven]) -> None:
        """Compute a step of the jobs that have not ended, in one forward pass."""
        going_on = [job for job in jobs if not job.has_ended]
        feeds = {job: job._wants for job in going_on if isinstance(job._wants, Feed)}
        for job in going_on:
            if isinstance(job._wants, Encode):
                job._send(job._wants.describe())
        if feeds:
            for job, logits in zip(feeds, forward([*feeds.values()]), strict=True):
                job._send(logits)

    def drop(self) -> None:
        """End the job, as the engine does with a cancelled one."""
        self._steps.close()

    def _send(self, output: Any) -> None:
        try:
            wants = self._steps.send(output)
            while isinstance(wants, (Evaluate, EarlyResult, FirstResult)):
                if isinstance(wants, (EarlyResult, FirstResult)):
                    self.result = wants.result
                else:
                    mx.eval(wants.arrays)
                wants = self._steps.send(None)
            self._wants = wants
        except StopIteration as stop:
            self.has_ended, self.result = True, stop.value


def idle_worker(model: LoadedModel) -> Worker:
    """Return a worker that describes its model, and computes nothing."""
    nothing: Any = None
    caches = CacheCapacity(1, CacheFootprint())
    return Worker(nothing, model, caches, PrefixCache(0), nothing, nothing, StepCosts({1: {1: 0.01}}))


def finish(steps: Steps[Result]) -> Result:
    """Run a job to its end."""
    driven = Driven(steps)
    while not driven.has_ended:
        driven.step()
    result: Result = driven.result
    return result


def run_some(steps: Steps[Any], num_steps: int) -> None:
    """Run a job and drop it, as when a newer request supersedes it."""
    driven = Driven(steps)
    for _ in range(num_steps):
        driven.step()
    driven.drop()


def feed_now(cache: SessionCache, token_ids: list[int]) -> mx.array:
    """Feed tokens, and return their logits."""
    return finish(cache.feed(mx.array(token_ids)))

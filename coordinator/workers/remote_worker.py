"""The view of a worker that all sessions share."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from coordinator.core import SessionSetup
from specd.cache_footprint import CacheFootprint
from specd.model_info import ModelInfo
from specd.step_costs import StepCosts

Stream_co = TypeVar("Stream_co", covariant=True)


@dataclass(eq=False)
class WorkerLife:
    """A worker's process, from start to end, and the whole fingerprint of its model as soon as it is known."""

    incarnation: str = ""
    whole_fingerprint: str = ""

    def continues(self, earlier: WorkerLife) -> bool:
        """Return whether sessions of an earlier life can continue in this one: the model is certainly the same."""
        is_same_model = "" != self.whole_fingerprint == earlier.whole_fingerprint
        return self.incarnation == earlier.incarnation or is_same_model


@dataclass(frozen=True)
class TargetDraft:
    """The model with which a target worker proposes tokens, and its costs."""

    model: ModelInfo
    step_costs: StepCosts | None


class RemoteWorker(Generic[Stream_co]):
    """The presence, the model and the costs of a worker, for all sessions. This class is a worker that never comes.

    `model` is set while the worker is there with a model that can be used. Otherwise `fault` is the reason for
    programs, such as DRAFT_UNAVAILABLE, and `refusal` the reason for people if a worker is there and cannot be used.
    Its `life`, its `step_costs` in seconds by sessions and tokens, its `cache_bytes` for the caches of all sessions and
    the `footprint` of one session are the last known ones, and for a target that proposes tokens its `self_draft`.
    """

    def __init__(self, fault: str, model: ModelInfo | None = None) -> None:
        self.fault = fault
        self.model = model
        self.refusal = ""
        self.life = WorkerLife()
        self.step_costs: StepCosts | None = None
        self.self_draft: TargetDraft | None = None
        self.cache_bytes, self.footprint = 0, CacheFootprint()
        self._changed = asyncio.Event()

    def open_stream(self, setup: SessionSetup) -> Stream_co:
        """Open a stream for a session; if the worker is away, its first use fails."""
        raise AssertionError(self.fault)

    async def wait_until_ready(self, timeout_seconds: float) -> bool:
        """Wait until the worker is there with a usable model; return whether it is."""
        return await self._wait_until(lambda: self.model is not None, timeout_seconds)

    async def wait_until_judged(self, timeout_seconds: float) -> bool:
        """Wait until the worker is there and its model accepted or refused; return whether it is."""
        return await self._wait_until(lambda: self.model is not None or bool(self.refusal), timeout_seconds)

    async def _wait_until(self, condition: Callable[[], bool], timeout_seconds: float) -> bool:
        try:
            async with asyncio.timeout(timeout_seconds if timeout_seconds < math.inf else None):
                while not condition():
                    await self._changed.wait()
        except TimeoutError:
            return condition()
        return True

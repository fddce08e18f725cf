"""The view of a worker that all sessions share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from coordinator.core import SessionSetup
from coordinator.workers.changes import Changes
from specd.cache_footprint import CacheFootprint
from specd.model_info import ModelInfo
from specd.step_costs import StepCosts

Stream_co = TypeVar("Stream_co", covariant=True)


@dataclass(eq=False)
class WorkerLife:
    """A worker's process, from start to end, and the whole fingerprint of its model as soon as it is known.

    Workers of the same `kernel_class` compute the same model with the same rounding.
    """

    incarnation: str = ""
    whole_fingerprint: str = ""
    kernel_class: str = ""

    def continues(self, earlier: WorkerLife) -> bool:
        """Return whether sessions of an earlier life can continue in this one: the model is certainly the same."""
        is_same_model = "" != self.whole_fingerprint == earlier.whole_fingerprint
        return self.incarnation == earlier.incarnation or is_same_model

    def equals(self, other: WorkerLife) -> bool:
        """Return whether sessions of another worker's life can continue in this one with the same rounding."""
        return self.continues(other) and "" != self.kernel_class == other.kernel_class


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
    Its prefix cache holds about `prefix_cache_tokens`. `address` is where it is, for people.
    """

    def __init__(self, fault: str, model: ModelInfo | None = None, address: str = "") -> None:
        self.fault = fault
        self.address = address
        self.model = model
        self.refusal = ""
        self.life = WorkerLife()
        self.step_costs: StepCosts | None = None
        self.self_draft: TargetDraft | None = None
        self.cache_bytes, self.footprint = 0, CacheFootprint()
        self.prefix_cache_tokens = 0
        self.changes = Changes()

    def open_stream(self, setup: SessionSetup) -> Stream_co:
        """Open a stream for a session; if the worker is away, its first use fails."""
        raise AssertionError(self.fault)

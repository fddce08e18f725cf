"""What the parts of a worker share."""

from __future__ import annotations

from dataclasses import dataclass

from specd.worker.engine import Engine
from specd.worker.metrics import WorkerMetrics
from specd.worker.model import LoadedModel
from specd.worker.session_cache import SessionCache


@dataclass(frozen=True)
class Worker:
    """A loaded model, the engine that computes it, and the sessions that it holds."""

    engine: Engine
    model: LoadedModel
    caches: set[SessionCache]
    metrics: WorkerMetrics
    prefill_chunk_tokens: int

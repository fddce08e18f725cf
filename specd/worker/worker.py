"""What the parts of a worker share."""

from __future__ import annotations

from dataclasses import dataclass

from specd.worker.engine import Engine
from specd.worker.metrics import WorkerMetrics
from specd.worker.model import LoadedModel
from specd.worker.prefix_cache import PrefixCache
from specd.worker.session_cache import SessionCache


@dataclass(frozen=True)
class Worker:
    """A loaded model, the engine that computes it, the sessions that it holds and what ended ones left."""

    engine: Engine
    model: LoadedModel
    caches: set[SessionCache]
    prefixes: PrefixCache
    metrics: WorkerMetrics
    prefill_chunk_tokens: int

"""What the parts of a worker share."""

from __future__ import annotations

from dataclasses import dataclass

from specd.step_costs import StepCosts
from specd.worker.chunk_size import ChunkSize
from specd.worker.engine import Engine
from specd.worker.live_caches import LiveCaches
from specd.worker.metrics import WorkerMetrics
from specd.worker.model import LoadedModel
from specd.worker.prefix_cache import PrefixCache


@dataclass(frozen=True)
class Worker:
    """A loaded model, the engine that computes it, the sessions that it holds and what ended ones left."""

    engine: Engine
    model: LoadedModel
    caches: LiveCaches
    prefixes: PrefixCache
    metrics: WorkerMetrics
    chunk: ChunkSize
    costs: StepCosts

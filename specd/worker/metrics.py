"""What a worker counts."""

from __future__ import annotations

from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from specd.metrics import SECONDS_BUCKETS
from specd.worker.session_cache import SessionCache


class WorkerMetrics:
    """The metrics of one worker, in a registry that the caller chose."""

    def __init__(self, registry: CollectorRegistry, caches: Collection[SessionCache]) -> None:
        """Register the metrics; `caches` are the worker's live ones, read at each scrape."""
        active_sessions = Gauge("specd_worker_active_sessions", "Sessions with a cache.", registry=registry)
        active_sessions.set_function(lambda: len(caches))
        cached_tokens = Gauge("specd_worker_cached_tokens", "Tokens in all caches.", registry=registry)
        cached_tokens.set_function(lambda: sum(cache.cached_len for cache in tuple(caches)))
        self.requests = Counter(
            "specd_worker_requests", "Requests by outcome: done, superseded or failed.", ["outcome"], registry=registry
        )
        self.compute_seconds = Histogram(
            "specd_worker_compute_seconds",
            "Time a request computes.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "specd_worker_queue_seconds",
            "Time a request waits while the model serves other sessions.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        for outcome in ("done", "superseded", "failed"):
            self.requests.labels(outcome)

"""The metrics of a worker."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specd.rpc.metrics_endpoint import SECONDS_BUCKETS
from specd.worker.engine.scheduler import StepTime
from specd.worker.session.capacity import CacheCapacity
from specd.worker.session.prefix_cache import PrefixCache

_POWERS_OF_TWO = tuple(2.0**i for i in range(12))


class WorkerMetrics:
    """The metrics of one worker, in the caller's registry."""

    def __init__(self, registry: CollectorRegistry, caches: CacheCapacity, prefixes: PrefixCache) -> None:
        """Register the metrics. `caches` and `prefixes` are read at each scrape."""
        active_sessions = Gauge("specd_worker_active_sessions", "Sessions with a cache.", registry=registry)
        active_sessions.set_function(lambda: len(caches))
        cached_tokens = Gauge("specd_worker_cached_tokens", "Tokens in the caches of sessions.", registry=registry)
        cached_tokens.set_function(lambda: sum(len(cache.layers.source) + cache.cached_len for cache in caches))
        cache_bytes = Gauge("specd_worker_cache_bytes", "Memory of the caches of sessions.", registry=registry)
        bytes_for = caches.footprint.bytes_for
        cache_bytes.set_function(lambda: sum(bytes_for(cache.cached_len, len(cache.layers.source)) for cache in caches))
        Gauge(
            "specd_worker_cache_capacity_bytes", "Memory that the caches of sessions may take.", registry=registry
        ).set(caches.capacity_bytes)
        memory = Gauge(
            "specd_worker_memory_bytes",
            "MLX's memory: in use (active), kept to be used again (cached), and the most that was in use (peak).",
            ["kind"],
            registry=registry,
        )
        memory.labels("active").set_function(mx.get_active_memory)
        memory.labels("cached").set_function(mx.get_cache_memory)
        memory.labels("peak").set_function(mx.get_peak_memory)
        registry.register(_PrefixCacheMetrics(prefixes))
        self.requests = Counter(
            "specd_worker_requests", "Requests by outcome: done, superseded or failed.", ["outcome"], registry=registry
        )
        self.compute_seconds = Histogram(
            "specd_worker_compute_seconds",
            "Time that a request computes.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "specd_worker_queue_seconds",
            "Time that a request waits while the model serves other sessions.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.mask_seconds = Histogram(
            "specd_worker_mask_seconds",
            "Time to compute the masks of a request in a session with a grammar, beside the pass.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.step_seconds = Histogram(
            "specd_worker_step_seconds",
            "Time of a step: one forward pass, for rounds of several sessions or for a chunk of a prompt.",
            ["kind"],
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.step_sessions = Histogram(
            "specd_worker_step_sessions",
            "Sessions in a step of rounds.",
            buckets=_POWERS_OF_TWO[:7],
            registry=registry,
        )
        self.step_tokens = Histogram(
            "specd_worker_step_tokens",
            "Tokens that a step computes, padding included.",
            ["kind"],
            buckets=_POWERS_OF_TWO,
            registry=registry,
        )
        for kind in ("rounds", "prefill"):
            self.step_seconds.labels(kind)
            self.step_tokens.labels(kind)
        for outcome in ("done", "superseded", "failed"):
            self.requests.labels(outcome)

    def count_step(self, step: StepTime) -> None:
        """Count a step of the engine."""
        kind = "prefill" if step.is_prefill else "rounds"
        self.step_seconds.labels(kind).observe(step.seconds)
        self.step_tokens.labels(kind).observe(step.num_tokens)
        if not step.is_prefill:
            self.step_sessions.observe(step.num_sessions)


class _PrefixCacheMetrics(Collector):
    """Reads a prefix cache, which does not depend on metrics."""

    def __init__(self, prefixes: PrefixCache) -> None:
        self._prefixes = prefixes

    def collect(self) -> Iterator[Metric]:
        """Read the prefix cache."""
        yield GaugeMetricFamily(
            "specd_worker_prefix_cache_bytes", "Memory of the caches that ended sessions left.", self._prefixes.nbytes
        )
        yield GaugeMetricFamily(
            "specd_worker_prefix_cache_entries", "Caches that ended sessions left.", self._prefixes.num_entries
        )
        yield CounterMetricFamily(
            "specd_worker_reused_tokens",
            "Tokens that sessions reused from the prefix cache.",
            self._prefixes.num_reused_tokens,
        )
        yield CounterMetricFamily(
            "specd_worker_prefix_cache_evictions",
            "Caches of ended sessions that were dropped because memory was short.",
            self._prefixes.num_evictions,
        )

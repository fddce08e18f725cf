"""Metrics of the gateway."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from specd.rpc.metrics_endpoint import SECONDS_BUCKETS


class GatewayMetrics:
    """Counts requests by endpoint and status."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "specd_http_requests",
            "HTTP requests, by their endpoint and status.",
            ("endpoint", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "specd_http_request_seconds",
            "Time from the headers of a request to the end of its answer.",
            ("endpoint",),
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.open_requests = Gauge(
            "specd_http_open_requests", "HTTP requests that are being answered.", registry=registry
        )

    def count(self, endpoint: str, status: str, seconds: float) -> None:
        """Count a request that has been answered."""
        self._requests.labels(endpoint, status).inc()
        self._seconds.labels(endpoint).observe(seconds)

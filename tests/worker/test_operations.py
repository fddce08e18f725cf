"""The operations page lists all metrics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from coordinator.telemetry.metrics import CoordinatorMetrics, error_counter
from gateway.metrics import GatewayMetrics
from specd.cache_footprint import CacheFootprint
from specd.rpc.metrics_endpoint import add_build_info, new_registry
from specd.worker.session.capacity import CacheCapacity
from specd.worker.session.metrics import WorkerMetrics
from specd.worker.session.prefix_cache import PrefixCache

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


def metrics_of(registry: CollectorRegistry) -> set[str]:
    """Return the names of metrics as they are scraped, histograms without their suffixes."""
    return {metric.name + {"counter": "_total", "info": "_info"}.get(metric.type, "") for metric in registry.collect()}


def test_the_page_names_every_metric_and_no_other() -> None:
    coordinator, gateway, worker = CollectorRegistry(), CollectorRegistry(), CollectorRegistry()
    process = new_registry()
    CoordinatorMetrics(coordinator)
    error_counter(coordinator)
    GatewayMetrics(gateway)
    WorkerMetrics(worker, CacheCapacity(1, CacheFootprint()), PrefixCache(1))
    add_build_info(process, "coordinator")

    tables = re.split("^### ", PAGE.split("## Alerts")[0], flags=re.MULTILINE)[1:]
    for table, registry in zip(tables, (coordinator, gateway, worker, process), strict=True):
        rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
        assert sorted(re.findall(r"`(\w+)", " ".join(rows))) == sorted(metrics_of(registry)), table.splitlines()[0]


def test_the_page_explains_every_label() -> None:
    registry = CollectorRegistry()
    CoordinatorMetrics(registry)
    error_counter(registry)
    metrics: list[Any] = [*registry._collector_to_names]
    labels_of = {m._name + ("_total" if m._type == "counter" else ""): m._labelnames for m in metrics}
    assert any(labels_of.values())
    for name, labels in labels_of.items():
        for label in labels:
            assert re.search(rf"`{name}{{[\w,]*\b{label}\b", PAGE), name

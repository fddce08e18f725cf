"""The operations page says what there is."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from coordinator.metrics import CoordinatorMetrics
from specd.metrics import add_build_info, new_registry
from specd.worker.live_caches import LiveCaches
from specd.worker.metrics import WorkerMetrics
from specd.worker.prefix_cache import PrefixCache

PAGE = (Path(__file__).parents[1] / "docs" / "operations.md").read_text()


def metrics_of(registry: CollectorRegistry) -> set[str]:
    """Return the names of metrics as they are scraped, histograms without their suffixes."""
    return {metric.name + {"counter": "_total", "info": "_info"}.get(metric.type, "") for metric in registry.collect()}


def test_the_page_names_every_metric_and_no_other() -> None:
    coordinator, worker, process = CollectorRegistry(), CollectorRegistry(), new_registry()
    CoordinatorMetrics(coordinator)
    WorkerMetrics(worker, LiveCaches(1), PrefixCache(1), bytes_per_token=1)
    add_build_info(process, "coordinator")

    tables = re.split("^### ", PAGE.split("## Alerts")[0], flags=re.MULTILINE)[1:]
    for table, registry in zip(tables, (coordinator, worker, process), strict=True):
        rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
        assert sorted(re.findall(r"`(\w+)", " ".join(rows))) == sorted(metrics_of(registry)), table.splitlines()[0]


def test_the_page_explains_every_label() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)
    for metric in vars(metrics).values():
        for label in getattr(metric, "_labelnames", ()):
            name = metric._name + ("_total" if metric._type == "counter" else "")
            assert re.search(rf"`{name}{{[\w,]*\b{label}\b", PAGE), name

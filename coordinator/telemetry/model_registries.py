"""The metrics of several models in one registry."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class ModelRegistries(Collector):
    """A registry for each model. A scrape finds them together, with the model's name in the label `model`."""

    def __init__(self) -> None:
        self._registries: dict[str, CollectorRegistry] = {}

    def of(self, model: str) -> CollectorRegistry:
        """Make the registry of a model."""
        self._registries[model] = registry = CollectorRegistry()
        return registry

    def forget(self, model: str) -> None:
        """Remove the metrics of a model, if there are any."""
        self._registries.pop(model, None)

    def describe(self) -> Iterable[Metric]:
        """Return nothing, because the names are only known at a scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of all models, each name once."""
        families: dict[str, Metric] = {}
        for model, registry in [*self._registries.items()]:
            for family in registry.collect():
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                merged.samples += [
                    sample._replace(labels={**sample.labels, "model": model}) for sample in family.samples
                ]
        return families.values()

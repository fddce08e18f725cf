"""The coordinator's metrics: their values at one time, and their changes between two times."""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from specd.rpc.credentials import client_context

_PATIENCE_SECONDS = 5.0

_Series = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True)
class Scrape:
    """The samples of a scrape by name and labels, and its time in seconds of the monotonic clock.

    Without samples, all counters are 0, as at the start of a process. `models` has the samples of each of several
    models by its name.
    """

    at: float = 0.0
    samples: Mapping[_Series, float] = field(default_factory=dict)
    models: Mapping[str, Mapping[_Series, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, at: float, samples: Mapping[_Series, float]) -> Scrape:
        """Return a scrape of one model alone, or of several: its samples are then their sums."""
        sums: dict[_Series, float] = {}
        models: dict[str, dict[_Series, float]] = {}
        for (name, labels), value in samples.items():
            model = dict(labels).get("model")
            series = name, frozenset((label, text) for label, text in labels if label != "model")
            sums[series] = sums.get(series, 0.0) + value
            if model is not None:
                models.setdefault(model, {})[series] = value
        return cls(at, sums, models)

    def of_model(self, name: str) -> Scrape:
        """Return the samples of one of several models."""
        return Scrape(self.at, self.models[name])

    def value(self, name: str, **labels: str) -> float:
        """Return a sample; 0 for one that is not there."""
        return self.samples.get((name, frozenset(labels.items())), 0.0)

    def series(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Return the labels and the value of each sample with this name."""
        return [(dict(labels), value) for (its_name, labels), value in self.samples.items() if its_name == name]

    def labels(self, name: str) -> Mapping[str, str]:
        """Return the labels of the only sample with this name, or no labels if there is no sample."""
        return next((dict(labels) for its_name, labels in self.samples if its_name == name), {})


@dataclass(frozen=True)
class Span:
    """The changes from one scrape to another."""

    begin: Scrape
    end: Scrape

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end.at - self.begin.at

    def increase(self, name: str, **labels: str) -> float:
        """Return by how much a counter rose."""
        return self.end.value(name, **labels) - self.begin.value(name, **labels)

    def ratio(self, name: str, over: str, **labels: str) -> float | None:
        """Return one counter's rise over another's; None if that did not rise."""
        whole = self.increase(over, **labels)
        return self.increase(name, **labels) / whole if whole else None

    def mean(self, name: str, **labels: str) -> float | None:
        """Return the mean of a histogram's observations; None if there were none."""
        return self.ratio(f"{name}_sum", f"{name}_count", **labels)


class MetricsReader:
    """Reads the metrics at an address, HOST:PORT; with `ca` over TLS."""

    def __init__(self, address: str, ca: Path | None, cert: Path | None, key: Path | None) -> None:
        """Raises StartupError if the certificate files cannot be used."""
        self._address = address
        self._context = client_context(ca, cert, key) if ca is not None else None

    def read(self) -> Scrape:
        """Scrape. Raises ConnectionError, with a message for people, if the answer is missing or unsuitable."""
        try:
            text = self._text()
            families = list(text_string_to_metric_families(text))
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = str(error) or type(error).__name__
            raise ConnectionError(f"the metrics at {self._address} cannot be read: {why}") from error
        samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }
        if not any(name == "specd_active_sessions" for name, _ in samples):
            raise ConnectionError(
                f"the process at {self._address} is not a coordinator: give the address of a coordinator's metrics"
            )
        return Scrape.of(time.monotonic(), samples)

    def _text(self) -> str:
        connection: http.client.HTTPConnection
        if self._context is None:
            connection = http.client.HTTPConnection(self._address, timeout=_PATIENCE_SECONDS)
        else:
            connection = http.client.HTTPSConnection(self._address, timeout=_PATIENCE_SECONDS, context=self._context)
        try:
            connection.request("GET", "/metrics")
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise ValueError(f"the server answered {response.status} {response.reason}")
            return response.read().decode()
        finally:
            connection.close()

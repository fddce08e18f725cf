"""Reads the dashboards as Grafana does: panels, and expressions whose variables have values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.prometheus.local import LocalPrometheus

_LABEL_VALUES = re.compile(r"label_values\((?P<series>.+), (?P<label>\w+)\)")


@dataclass(frozen=True)
class Query:
    """What a panel asks Prometheus for."""

    expression: str

    def resolved(self, variables: Mapping[str, str]) -> str:
        """Return the expression with values in the place of its variables."""
        return _substitute(self.expression, variables)


@dataclass(frozen=True)
class Panel:
    """One panel."""

    title: str
    description: str
    kind: str
    unit: str
    axis: str
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class Dashboard:
    """One dashboard, with the queries of its template variables, by name, in their order."""

    title: str
    variables: dict[str, str]
    all_values: dict[str, str]  # of the variables that have their own for all
    panels: tuple[Panel, ...]

    async def choose_all(self, prometheus: LocalPrometheus) -> dict[str, str]:
        """Return what stands for each variable where a reader chooses all of its values."""
        chosen = {"__rate_interval": f"{4 * prometheus.interval_seconds}s"}
        for name, query in self.variables.items():
            match = _LABEL_VALUES.fullmatch(query)
            assert match is not None, f"{query} is no query for values of a label"
            if name in self.all_values:
                chosen[name] = self.all_values[name]
                continue
            found = await prometheus.query(f"group by ({match['label']}) ({_substitute(match['series'], chosen)})")
            values = sorted(series["metric"][match["label"]] for series in found)
            # Twice: once for the regular expression, and once for the string that it is in.
            chosen[name] = "|".join(re.escape(value).replace("\\", r"\\") for value in values)
        return chosen


def read_dashboard(path: Path) -> Dashboard:
    """Read a dashboard from its JSON."""
    content = json.loads(path.read_text())
    listed = content["templating"]["list"]
    variables = {variable["name"]: variable["query"] for variable in listed}
    all_values = {variable["name"]: variable["allValue"] for variable in listed if variable.get("allValue")}
    return Dashboard(content["title"], variables, all_values, tuple(map(_panel, content["panels"])))


def _panel(content: dict[str, Any]) -> Panel:
    defaults = content["fieldConfig"]["defaults"]
    custom = defaults.get("custom", {})
    return Panel(
        title=content["title"],
        description=content["description"],
        kind=content["type"],
        unit=defaults["unit"],
        axis=custom.get("axisLabel", ""),
        queries=tuple(Query(target["expr"]) for target in content["targets"]),
    )


def _substitute(text: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$(\w+)", lambda variable: variables[variable[1]], text)

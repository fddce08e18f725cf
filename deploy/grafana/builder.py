"""Builders of panels, variables and dashboards, and of the PromQL that panels ask for."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase
from typing import TypeVar

from grafana_foundation_sdk.builders import dashboard, prometheus, statetimeline, timeseries
from grafana_foundation_sdk.builders.common import StackingConfig, VizLegendOptions, VizTooltipOptions
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    ValueMap,
    ValueMappingResult,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

# Selectors of the instances that the reader has chosen, and of the series of the chosen models: of a coordinator that
# serves one alone, they have no model, which `.*` matches as well.
COORDINATOR = '{instance=~"$coordinator"}'
MODEL = '{instance=~"$coordinator", model=~"$model"}'
WORKER = '{instance=~"$worker"}'

_COLUMNS = 24  # of Grafana's grid
_PROMETHEUS = DataSourceRef(type_val="prometheus", uid="prometheus")
_STATES = {
    "0": ValueMappingResult(text="away", color="semi-dark-red"),
    "1": ValueMappingResult(text="there", color="semi-dark-green"),
}

Panel = TypeVar("Panel", timeseries.Panel, statetimeline.Panel)


def make_dashboard(
    title: str,
    uid: str,
    text: str,
    *panels: timeseries.Panel | statetimeline.Panel,
    variables: Sequence[dashboard.QueryVariable] = (),
) -> dashboard.Dashboard:
    """Make a dashboard with variables for targets, coordinators and models, and others of its own."""
    made = dashboard.Dashboard(f"specd: {title}").uid(uid).description(text).tags(["specd"])
    made.time("now-1h", "now").refresh("10s").timezone("browser").tooltip(DashboardCursorSync.CROSSHAIR).readonly()
    made.with_variable(variable("target", "label_values(specd_model_info, target)", label="Target"))
    # The coordinators that serve these targets, and their models' names, if each serves several.
    coordinators = 'label_values(specd_model_info{target=~"$target"}, instance)'
    made.with_variable(variable("coordinator", coordinators, label="Coordinator"))
    models = 'label_values(specd_model_info{target=~"$target", instance=~"$coordinator"}, model)'
    made.with_variable(variable("model", models, label="Model").all_value(".*"))
    for own in variables:
        made.with_variable(own)
    for number, panel in enumerate(panels, start=1):
        made.with_panel(panel.id(number))
    return made


def lines(
    title: str, *, unit: str, axis: str, text: str, queries: dict[str, str], stacked: bool = False
) -> timeseries.Panel:
    """Make a panel of lines over time, a third of the width; `queries` are expressions by legend."""
    panel = timeseries.Panel().title(title).description(text).span(_COLUMNS // 3).height(8)
    panel.unit(unit).axis_label(axis).axis_soft_min(0)
    panel.line_width(1.5).fill_opacity(40 if stacked else 6).show_points(VisibilityMode.NEVER)
    if stacked:
        panel.stacking(StackingConfig().mode(StackingMode.NORMAL).group("all"))
    panel.legend(
        VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).show_legend(True)
    )
    panel.tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    return _with_queries(panel, queries)


def states(title: str, *, text: str, queries: dict[str, str]) -> statetimeline.Panel:
    """Make a panel of states over the whole width: 1 is there, 0 is away."""
    panel = statetimeline.Panel().title(title).description(text).span(_COLUMNS).height(6)
    panel.unit("bool_yes_no").mappings([ValueMap(_STATES)])
    return _with_queries(panel, queries)


def _with_queries(panel: Panel, queries: dict[str, str]) -> Panel:
    panel.datasource(_PROMETHEUS)
    for ref_id, (legend, expression) in zip(ascii_uppercase, queries.items(), strict=False):
        panel.with_target(prometheus.Dataquery().ref_id(ref_id).expr(expression).legend_format(legend).range())
    return panel


def variable(name: str, query: str, *, label: str) -> dashboard.QueryVariable:
    """Make a template variable: the reader chooses among the values of a query, at first all of them."""
    every = VariableOption(selected=True, text="All", value="$__all")
    made = dashboard.QueryVariable(name).label(label).query(query).datasource(_PROMETHEUS).current(every)
    made.multi(True).include_all(True).refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    return made.sort(VariableSort.ALPHABETICAL_ASC)


def rate(counter: str, *by: str, of: str = MODEL, over: str = "$__rate_interval") -> str:
    """Return the rise of a counter per second, summed over the chosen models or workers."""
    return f"sum by ({', '.join(by)}) (rate({counter}{of}[{over}]))"


def per(numerator: str, denominator: str) -> str:
    """Return a quotient, without a value while the denominator is 0."""
    return f"{numerator} / ({denominator} > 0)"


def mean(histogram: str, *by: str, of: str = MODEL) -> str:
    """Return the mean of the values that a histogram counts."""
    return per(rate(f"{histogram}_sum", *by, of=of), rate(f"{histogram}_count", *by, of=of))


def quantiles(histogram: str) -> dict[str, str]:
    """Return the 50th, 90th and 99th percentile by name."""
    buckets = rate(f"{histogram}_bucket", "le")
    return {f"p{round(100 * q)}": f"histogram_quantile({q}, {buckets})" for q in (0.5, 0.9, 0.99)}

"""Draws the dashboards over a recorded run: python -m deploy.grafana.render.

What each panel of the committed dashboards asks a real Prometheus for is drawn into docs/images, one picture each.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from deploy.grafana.generate import DIRECTORY
from deploy.grafana.reader import Dashboard, Panel, read_dashboard
from deploy.grafana.recorded_run import Line, record

_SCRAPE_SECONDS = 5  # as shipped
IMAGES = Path(__file__).parents[2] / "docs" / "images"

# In inches: a cell of Grafana's grid, the title above all, and what a panel has around its axes.
_CELL = (0.62, 0.42)
_TITLE = 0.55
_ABOVE, _BELOW, _LEFT, _RIGHT = 0.45, 0.85, 1.12, 0.25
_LEFT_OF_STATES = 2.6
_GAP = 0.06

_GREY = "#52545c"
_COLOURS = ("#3274d9", "#56a64b", "#e0a000", "#e02f44", "#a352cc", "#19a7a0", "#ff780a", "#7f7f7f")
_SCALES = {
    "percentunit": ((0.01, "%"),),
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "bytes": ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
    "reqps": ((1.0, "req/s"),),
}
_STATES = {0.0: ("away", "#e02f44"), 1.0: ("there", "#56a64b")}


def draw(dashboard: Dashboard, shown: Mapping[str, Sequence[Line]], path: Path, *, scrape_seconds: int) -> None:
    """Draw the panels of a dashboard where Grafana has them; `shown` has the lines of each by its title."""
    width = max(panel.grid.x + panel.grid.w for panel in dashboard.panels) * _CELL[0]
    height = max(panel.grid.y + panel.grid.h for panel in dashboard.panels) * _CELL[1] + _TITLE
    figure = Figure(figsize=(width, height), facecolor="#f4f5f5")
    figure.text(_LEFT / 4 / width, 1 - _TITLE / 2 / height, dashboard.title, size=17, weight="bold", va="center")

    def axes_at(left: float, top: float, right: float, bottom: float) -> Axes:
        return figure.add_axes((left / width, 1 - bottom / height, (right - left) / width, (bottom - top) / height))

    seen = {at for lines in shown.values() for line in lines for at in line.values}
    times = range(min(seen), max(seen) + 1, scrape_seconds)
    for panel in dashboard.panels:
        left, top = panel.grid.x * _CELL[0], panel.grid.y * _CELL[1] + _TITLE
        right, bottom = left + panel.grid.w * _CELL[0], top + panel.grid.h * _CELL[1]
        card = axes_at(left + _GAP, top + _GAP, right - _GAP, bottom - _GAP)
        card.set(xticks=[], yticks=[])
        card.spines[:].set_color("#dcdee0")
        figure.text((left + 0.2) / width, 1 - (top + 0.27) / height, panel.title, size=11, weight="bold", va="center")
        if panel.kind == "state-timeline":
            axes = axes_at(left + _LEFT_OF_STATES, top + _ABOVE, right - _RIGHT, bottom - _BELOW / 2)
            _draw_states(axes, shown[panel.title], scrape_seconds)
        else:
            axes = axes_at(left + _LEFT, top + _ABOVE, right - _RIGHT, bottom - _BELOW)
            _draw_lines(axes, panel, shown[panel.title], times)
        axes.set_xlim(times[0], times[-1])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds / 60:g} min"))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[3, 6]))
        axes.tick_params(labelsize=8, length=0, colors=_GREY)
        axes.spines[:].set_visible(False)
    figure.savefig(path, dpi=90, metadata={"Software": None})


def _draw_lines(axes: Axes, panel: Panel, lines: Sequence[Line], times: Sequence[int]) -> None:
    values = [[line.values.get(at, math.nan) for at in times] for line in lines]
    colours = [_COLOURS[number % len(_COLOURS)] for number in range(len(lines))]
    legends = [line.legend for line in lines]
    if panel.is_stacked:
        whole = [[0.0 if math.isnan(value) else value for value in row] for row in values]
        axes.stackplot(times, whole, labels=legends, colors=colours, alpha=0.6, linewidth=0)
    else:
        for legend, row, colour in zip(legends, values, colours, strict=True):
            axes.plot(times, row, label=legend, color=colour, linewidth=1.4)
    axes.set_ylim(bottom=0)
    axes.grid(color="#e8e9ea", linewidth=0.7)
    axes.set_axisbelow(True)
    # Not as the label of the axis, which would be nearer or farther with the length of the values.
    axes.annotate(
        panel.axis,
        (0, 0.5),
        xycoords="axes fraction",
        xytext=(-67, 0),
        textcoords="offset points",
        rotation=90,
        size=8,
        color=_GREY,
        ha="center",
        va="center",
    )
    scale, word = _scale(axes.get_ylim()[1], panel.unit)
    ticks = MaxNLocator(nbins=5).tick_values(0, axes.get_ylim()[1] / scale)[:-1]
    axes.set_yticks([scale * tick for tick in ticks], [f"{tick:.4g} {word}" for tick in ticks])
    columns = max(2, min(4, 48 // max(map(len, legends))))
    axes.legend(loc="upper left", bbox_to_anchor=(-0.1, -0.13), ncols=columns, fontsize=7.5, frameon=False)


def _draw_states(axes: Axes, lines: Sequence[Line], scrape_seconds: int) -> None:
    for row, line in enumerate(lines):
        for at, value in line.values.items():
            axes.barh(row, scrape_seconds, left=at, color=_STATES[value][1], height=0.7)
    axes.set_yticks(range(len(lines)), [line.legend for line in lines])
    axes.invert_yaxis()
    for word, colour in _STATES.values():
        axes.bar(0, 0, color=colour, label=word)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8, frameon=False)


def _scale(most: float, unit: str) -> tuple[float, str]:
    """Return in what multiples of a unit, and in which word, Grafana writes values of up to so many."""
    scales = _SCALES.get(unit, ((1.0, unit.removeprefix("suffix:")),))
    return next((scale for scale in scales if most >= scale[0]), scales[-1])


def main() -> None:
    """Record, and draw."""
    dashboards = {path: read_dashboard(path) for path in sorted(DIRECTORY.glob("*.json"))}
    IMAGES.mkdir(exist_ok=True)
    recorded = asyncio.run(record(tuple(dashboards.values()), _SCRAPE_SECONDS))
    for (path, dashboard), shown in zip(dashboards.items(), recorded, strict=True):
        draw(dashboard, shown, IMAGES / f"{path.stem}.png", scrape_seconds=_SCRAPE_SECONDS)


if __name__ == "__main__":
    main()

"""Plot of the results over k. Needs matplotlib, which the extra `plot` installs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specd.bench.sample import SetupResult
from specd.errors import StartupError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROW_INCHES = (11, 4.2)
_DOTS_PER_INCH = 150


def require_matplotlib() -> None:
    """Raise StartupError if matplotlib is missing. Call it before the long measurement."""
    try:
        import matplotlib.backends.backend_agg  # noqa: F401
    except ImportError as error:
        raise StartupError(
            f"--plot needs matplotlib ({error}): install it ('pip install matplotlib'), or specd with its extra 'plot'"
        ) from error


def save_plot(results: Sequence[SetupResult], title: str, path: Path) -> None:
    """Write the plot to a PNG file."""
    # Not through pyplot, which has global figures and a global backend.
    draw(results, title).savefig(path, format="png", backend="agg")


def draw(results: Sequence[SetupResult], title: str) -> Figure:
    """Draw a row for each temperature: speed-up against specd's target alone, and acceptance rate, both over k.

    An adaptive contender, which has no k, is a dashed line. mlx-lm has no acceptance rate, because it does not report
    how many tokens its draft proposes.
    """
    from matplotlib.figure import Figure

    temperatures = list(dict.fromkeys(result.setup.temperature for result in results))
    width, height = _ROW_INCHES
    figure = Figure(figsize=(width, height * len(temperatures)), dpi=_DOTS_PER_INCH, layout="constrained")
    figure.suptitle(title)
    rows = figure.subplots(len(temperatures), 2, sharex=True, squeeze=False)
    for (speedup, acceptance), temperature in zip(rows, temperatures, strict=True):
        own = [result for result in results if result.setup.temperature == temperature]
        how = f"temperature {temperature:g}" if temperature else "greedy"

        _draw_panel(speedup, own, lambda result: result.speedup)
        speedup.set_title(f"speed-up, {how}")
        speedup.set_ylabel("tokens/s, times those of specd's target alone")
        speedup.set_ylim(bottom=0)

        _draw_panel(acceptance, own, lambda result: _percent(result.acceptance_rate))
        acceptance.set_title(f"acceptance rate, {how}")
        acceptance.set_ylabel("accepted tokens, % of proposed")
        acceptance.set_ylim(0, 100)
    return figure


def _draw_panel(axes: Axes, results: Sequence[SetupResult], measure: Callable[[SetupResult], float | None]) -> None:
    by_series: dict[str, list[SetupResult]] = {}
    for result in results:
        by_series.setdefault(f"{result.setup.system}{result.setup.method}", []).append(result)
    for number, (name, own) in enumerate(by_series.items()):
        colour = f"C{number}"
        points = sorted(
            (result.setup.num_draft_tokens, value)
            for result in own
            if result.setup.num_draft_tokens is not None and (value := measure(result)) is not None
        )
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=name)
        for result in own:
            if result.setup.is_adaptive and (value := measure(result)) is not None:
                axes.axhline(value, linestyle="--", color=colour, label=result.setup.label)
    axes.set_xticks(sorted({k for result in results if (k := result.setup.num_draft_tokens) is not None}))
    axes.set_xlabel("k, draft tokens a round (0: the target alone)")
    axes.tick_params(labelbottom=True)  # a shared axis labels only the last row
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def _percent(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction

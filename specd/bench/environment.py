"""Environment of a measurement, and the table of its results."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib.metadata import version

from rich.console import Console
from rich.table import Table

from specd.version import __version__

_WIDTH = 120


def environment(**facts: object) -> dict[str, object]:
    """Return versions, machine and these facts, for a report."""
    return {
        "specd": __version__,
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "grpcio": version("grpcio"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        **facts,
    }


def new_table(title: str, headers: Iterable[str]) -> Table:
    """Return a table with a column of names under the title, and one of numbers under each header."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(title)  # a narrow terminal wraps the names, and does not cut the numbers
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def say(stage: str) -> None:
    """Print on standard error the stage that runs now."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"{stage} …", style="dim")


def console() -> Console:
    """Return the console for tables; without a terminal it is wide enough for them."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_WIDTH)

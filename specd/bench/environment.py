"""Where something was measured, and where its table goes."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

from rich.console import Console

from specd import __version__

_WIDTH = 120


def environment(**facts: object) -> dict[str, object]:
    """Describe for a report where and with what it was measured, and whatever else the caller knows."""
    return {
        "specd": __version__,
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "grpcio": version("grpcio"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        **facts,
    }


def console() -> Console:
    """Return where tables go: without a terminal, wide enough for them."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=_WIDTH)

"""Progress of loading models on a terminal: one line a model, removed when all are ready."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from specd.model_info import short_name_of


class StartProgress:
    """Lines with the progress of models, as a context manager. They stay below all other output."""

    def __init__(self, console: Console, models: Mapping[str, str]) -> None:
        """Show these models, by the name of their process."""
        self._console = console
        columns = (TextColumn("{task.description}"), TextColumn("{task.fields[stage]}"), BarColumn(20))
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._tasks: dict[str, TaskID] = {
            process: self._progress.add_task(
                f"{process.removesuffix('-worker'):7} {short_name_of(name)}", total=None, stage="starting"
            )
            for process, name in models.items()
        }

    def __enter__(self) -> StartProgress:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def show(self, process: str, said: Mapping[str, Any]) -> None:
        """Show the stage that a starting process reports, and for a download the bytes."""
        if process not in self._tasks:
            return
        stage, done, total = said["stage"], said.get("done"), said.get("total")
        if total:
            stage += f" {(done or 0) / 1e9:.2f} of {total / 1e9:.2f} GB"
        is_ready = stage == "ready"
        self._progress.update(
            self._tasks[process], stage=stage, total=1 if is_ready else total, completed=1 if is_ready else done or 0
        )

    def write(self, line: str) -> None:
        """Write a line above."""
        self._console.print(Text(line), soft_wrap=True)

"""Keeps what the planner has learnt of a pair in the user's cache, for the next start."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import structlog

from coordinator.planner.planner import Planner
from specd.model_info import ModelInfo
from specd.user_cache import user_cache_directory
from specd.version import __version__

log = structlog.get_logger()

_MOST_BYTES = 1 << 20


class Memory:
    """A file for each pair of models, devices and versions."""

    def __init__(self, planner: Planner, models: Callable[[], Iterable[ModelInfo | None]]) -> None:
        """`models` returns the present target and draft."""
        self._planner, self._models = planner, models
        self._pair: list[tuple[str, str, str] | None] = []
        self._num_rounds = 0  # when it was last kept

    @property
    def num_rounds(self) -> int:
        """The rounds that its planner has seen."""
        return self._planner.num_rounds

    def recall(self) -> None:
        """Restore what was kept. Without a usable file, the planner learns from the beginning."""
        path = self.file()
        try:
            if path is not None and path.stat().st_size <= _MOST_BYTES:
                self._planner.restore(json.loads(path.read_text()))
        except FileNotFoundError:
            pass
        except Exception as error:  # whatever a damaged file can hold
            log.warning("cannot use what the planner had learnt, learning again", path=str(path), error=repr(error))

    async def keep(self) -> None:
        """Keep what was learnt since the last time, without blocking the event loop."""
        path = self.file()
        if path is not None and self._num_rounds != self._planner.num_rounds:
            self._num_rounds = self._planner.num_rounds
            await asyncio.to_thread(_write, path, self._planner.learnt())

    def file(self) -> Path | None:
        """Return the file of the present pair, or of the latest one while one of its models is away."""
        pair = [(each.fingerprint, each.device, each.precision) if each else None for each in self._models()]
        if len(pair) - pair.count(None) >= len(self._pair) - self._pair.count(None):
            self._pair = pair
        digest = hashlib.sha256(repr((__version__, self._pair)).encode()).hexdigest()
        directory = user_cache_directory()
        return directory and directory / f"planner-{digest[:24]}.json"


def _write(path: Path, learnt: dict[str, Any]) -> None:
    partial = path.with_suffix(f".{os.getpid()}")  # renamed when it is whole: another coordinator may read it now
    try:
        partial.write_text(json.dumps(learnt))
        partial.rename(path)
    except OSError as error:
        log.warning("cannot keep what the planner has learnt", path=str(path), error=str(error))
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)

"""The wire to the supervisor, which starts and stops the workers of models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specd.errors import UnavailableError
from specd.supervised import tell_supervisor

_RETRY_SECONDS = 5.0


@dataclass(frozen=True)
class LoadProgress:
    """The progress of a start of workers: the stage of one process, and of a download its bytes."""

    process: str = ""
    stage: str = ""
    done_bytes: int = 0
    total_bytes: int = 0


class Loader:
    """Asks the supervisor for the workers of models, by their keys, and takes its messages."""

    def __init__(self) -> None:
        self.on_models: Callable[[], None] = lambda: None  # called when the file of models has changed
        self.on_failure: Callable[[str, str], None] = lambda key, reason: None  # of workers that had been loaded
        self._progress: dict[str, LoadProgress] = {}
        self._loading: dict[str, asyncio.Future[None]] = {}
        self._unloading: dict[str, asyncio.Future[None]] = {}
        self._listing: asyncio.Future[set[str]] | None = None

    def take(self, message: Mapping[str, Any]) -> None:
        """Take a message of the supervisor."""
        match message:
            case {"event": "running", "keys": list(keys)}:
                if self._listing is not None and not self._listing.done():
                    self._listing.set_result({*map(str, keys)})
            case {"event": "progress", "key": str(key)}:
                self._progress[key] = LoadProgress(
                    str(message.get("process", "")),
                    str(message.get("stage", "")),
                    int(message.get("done", 0)),
                    int(message.get("total", 0)),
                )
            case {"event": "loaded", "key": str(key)}:
                if (loading := self._loading.get(key)) is not None and not loading.done():
                    loading.set_result(None)
            case {"event": "failed", "key": str(key), "reason": str(reason)}:
                if (loading := self._loading.get(key)) is not None and not loading.done():
                    error = UnavailableError("MODEL_NOT_LOADED", reason, retry_after_seconds=_RETRY_SECONDS)
                    loading.set_exception(error)
                else:
                    self.on_failure(key, reason)
            case {"event": "unloaded", "key": str(key)}:
                if (unloading := self._unloading.get(key)) is not None and not unloading.done():
                    unloading.set_result(None)
            case {"event": "models"}:
                self.on_models()

    async def running(self) -> set[str]:
        """Return the keys of the models that are loaded already."""
        self._listing = asyncio.get_running_loop().create_future()
        tell_supervisor(request="list")
        return await self._listing

    async def load(self, key: str) -> None:
        """Have the workers of a model started, and wait until they are ready. Raises UnavailableError."""
        self._loading[key] = asyncio.get_running_loop().create_future()
        try:
            tell_supervisor(request="load", key=key)
            await self._loading[key]
        finally:
            del self._loading[key]
            self._progress.pop(key, None)

    async def unload(self, key: str) -> None:
        """Have the workers of a model stopped, and wait until they have ended."""
        self._unloading[key] = asyncio.get_running_loop().create_future()
        try:
            tell_supervisor(request="unload", key=key)
            await self._unloading[key]
        finally:
            del self._unloading[key]

    def progress(self, key: str) -> LoadProgress:
        """Return the latest progress of a model that is being loaded."""
        return self._progress.get(key, LoadProgress())

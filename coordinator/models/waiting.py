"""A request's wait for its model, and its use of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from coordinator.coordinator import Coordinator
from coordinator.models.loader import LoadProgress
from coordinator.models.served_model import ServedModel
from specd.errors import UnavailableError

_PROGRESS_SECONDS = 0.2


class Waiting:
    """A request that waits for its model, and then uses it."""

    def __init__(self, model: ServedModel, progress: Callable[[ServedModel], LoadProgress]) -> None:
        """`progress` returns how far the start of a model is."""
        self.model = model  # another one from the time when that has replaced it
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_admitted = False
        self._progress = progress

    async def ready(self) -> Coordinator:
        """Wait for the model. Raises UnavailableError if it cannot be loaded."""
        await self.turn
        if self.model.coordinator is None:
            raise UnavailableError("MODEL_NOT_LOADED", f"the model {self.model.name!r} has lost its workers")
        return self.model.coordinator

    async def progress(self) -> AsyncIterator[LoadProgress]:
        """Yield how far the model is until it is there, or cannot be loaded."""
        last = None
        while not self.turn.done():
            now = self._progress(self.model)
            if now != last:
                last = now
                yield now
            await asyncio.wait({self.turn}, timeout=_PROGRESS_SECONDS)

"""Hands generations back to their callers when the coordinator stops and they have not ended in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from specd.errors import UnavailableError

_RETRY_SECONDS = 1.0


class HandBack:
    """Ends what still runs, with an error that says how to go on; gRPC itself would end it without a reason."""

    def __init__(self) -> None:
        self._running: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Do something that can be handed back. Raises UnavailableError (STOPPING) when it is."""
        try:
            async with asyncio.timeout(None) as timeout:
                self._running.add(timeout)
                try:
                    yield
                finally:
                    self._running.discard(timeout)
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise UnavailableError(
                "STOPPING",
                "the coordinator is stopping: to go on, send the tokens so far as the prompt when it is back, or to "
                "another",
                retry_after_seconds=_RETRY_SECONDS,
            ) from error

    def all(self) -> None:
        """Hand everything back that runs now."""
        for timeout in tuple(self._running):
            timeout.reschedule(asyncio.get_running_loop().time())

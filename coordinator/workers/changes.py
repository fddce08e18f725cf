"""Waiting for workers that come, go, and change."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Changes:
    """Wakes those who wait for a condition on workers."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Let all waiting tasks look at their condition again."""
        self._changed.set()
        self._changed.clear()

    async def wait_until(self, condition: Callable[[], bool], timeout_seconds: float) -> bool:
        """Wait until a condition holds; return whether it does."""
        try:
            async with asyncio.timeout(timeout_seconds if timeout_seconds < math.inf else None):
                while not condition():
                    await self._changed.wait()
        except TimeoutError:
            return condition()
        return True

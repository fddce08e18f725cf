"""Freeing memory while the machine is short of it, before the system kills a process.

All that a worker holds can be rebuilt from tokens, so it can all be given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import mlx.core as mx
import structlog

from specd.machine import available_memory
from specd.worker.engine.engine import Engine
from specd.worker.session.capacity import CacheCapacity
from specd.worker.session.prefix_cache import PrefixCache

log = structlog.get_logger()

_LOOK_SECONDS = 1.0


class MemoryWatch:
    """Keeps a reserve for the system: frees prefixes first, then refuses new sessions, then ends the largest session.

    Sessions that are refused or ended lose no token: the coordinator sends them again when there is room, or fails them
    with CACHE_FULL after its recovery time. Without the draft's cache a session continues with the target alone.
    """

    def __init__(
        self,
        engine: Engine,
        caches: CacheCapacity,
        prefixes: Sequence[PrefixCache],
        *,
        reserve_bytes: int,
        available: Callable[[], int] = available_memory,
    ) -> None:
        """Leave `reserve_bytes` of what `available` returns. The first of the `prefixes` are freed first."""
        self._engine, self._caches, self._prefixes = engine, caches, prefixes
        self._reserve_bytes = reserve_bytes
        self._available = available

    async def run(self) -> None:
        """Check every second, for ever."""
        while self._reserve_bytes:
            self.look()
            await asyncio.sleep(_LOOK_SECONDS)

    def look(self) -> None:
        """Take the next measure if memory is short, and accept sessions again once it is not."""
        missing = self._reserve_bytes - self._available()
        was_short = not self._caches.accepts_new
        if missing <= 0:
            self._caches.accepts_new = True
            if was_short:
                log.info("enough memory is available again: new sessions begin")
            return
        if sum(each.nbytes for each in self._prefixes) >= missing:
            log.warning("memory is short: freeing cached prefixes", missing_bytes=missing)
        elif not was_short:
            self._caches.accepts_new = False
            log.warning("memory is short: refusing new sessions", missing_bytes=missing)
        elif missing > self._reserve_bytes / 2 and self._caches.give_up_largest():
            log.warning("memory is very short: ending the largest session", missing_bytes=missing)
        self._engine.run_soon(lambda: self._free(missing))

    def _free(self, num_bytes: int) -> None:
        """Free cached prefixes. Runs on the engine's thread, which may have stored more since."""
        for prefixes in self._prefixes:
            held = prefixes.nbytes
            prefixes.shrink(num_bytes)
            num_bytes -= held - prefixes.nbytes
        mx.clear_cache()

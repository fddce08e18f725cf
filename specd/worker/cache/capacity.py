"""The caches of the sessions that a worker serves."""

from __future__ import annotations

from collections.abc import Iterator

from specd.errors import ResourceExhaustedError
from specd.worker.cache.session_cache import SessionCache

_RETRY_SECONDS = 1.0


class CacheCapacity:
    """The caches of open streams, and the room that they share.

    A coordinator admits no more than there is room for; this holds whoever else calls to it.
    Read and changed from the event loop, and `discard` from the engine's thread.
    """

    def __init__(self, capacity_tokens: int) -> None:
        """Have room for this many tokens, in all caches together."""
        self.capacity_tokens = capacity_tokens
        self._reserved: dict[SessionCache, int] = {}

    def __iter__(self) -> Iterator[SessionCache]:
        """Iterate over the caches as they are now."""
        return iter(tuple(self._reserved))

    def __len__(self) -> int:
        """Count the caches."""
        return len(self._reserved)

    def add(self, cache: SessionCache) -> None:
        """Add the cache of a new session, which holds nothing yet."""
        self._reserved[cache] = 0

    def reserve(self, cache: SessionCache, num_tokens: int) -> None:
        """Let a cache hold this many tokens. Raises ResourceExhaustedError (CACHE_FULL) if there is no room."""
        others = sum(tuple(self._reserved.values())) - self._reserved[cache]
        if others + num_tokens > self.capacity_tokens:
            raise ResourceExhaustedError(
                "CACHE_FULL",
                f"the session would hold {num_tokens} tokens and the {len(self) - 1} others hold {others}, but this "
                f"worker has room for {self.capacity_tokens}: end sessions, or raise --cache-bytes",
                retry_after_seconds=_RETRY_SECONDS,
            )
        self._reserved[cache] = num_tokens

    def discard(self, cache: SessionCache) -> None:
        """Forget the cache of a session that has ended."""
        self._reserved.pop(cache, None)

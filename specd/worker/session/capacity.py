"""The caches of a worker's sessions, and the limit of their memory."""

from __future__ import annotations

from collections.abc import Iterator

from specd.cache_footprint import CacheFootprint
from specd.errors import ResourceExhaustedError
from specd.worker.session.session_cache import SessionCache

_RETRY_SECONDS = 1.0


class CacheCapacity:
    """The caches of open streams, and the memory that they share.

    A coordinator admits only sessions for which there is room; this also bounds all other callers. It is read and
    changed on the event loop, except for `discard` on the engine's thread.
    """

    def __init__(self, capacity_bytes: int, footprint: CacheFootprint) -> None:
        """Have this much memory for all caches together; `footprint` is the memory of one session's caches."""
        self.capacity_bytes = capacity_bytes
        self.footprint = footprint
        self.accepts_new = True  # whether sessions without tokens in their caches may begin
        self._reserved: dict[SessionCache, int] = {}
        self._given_up: set[SessionCache] = set()

    def __iter__(self) -> Iterator[SessionCache]:
        """Iterate over a copy of the list of caches."""
        return iter(tuple(self._reserved))

    def __len__(self) -> int:
        """Count the caches."""
        return len(self._reserved)

    def add(self, cache: SessionCache) -> None:
        """Add the empty cache of a new session."""
        self._reserved[cache] = 0

    def reserve(self, cache: SessionCache, num_tokens: int) -> None:
        """Let a cache hold its source and this many tokens. Raises ResourceExhaustedError (CACHE_FULL) without room."""
        if cache in self._given_up or not (self.accepts_new or self._reserved[cache]):
            raise ResourceExhaustedError(
                "CACHE_FULL",
                "this machine is short of memory: end other programs, or lower --cache-bytes or --memory-reserve-bytes",
                retry_after_seconds=_RETRY_SECONDS,
            )
        num_bytes = self.footprint.bytes_for(num_tokens, len(cache.source))
        others = sum(tuple(self._reserved.values())) - self._reserved[cache]
        if others + num_bytes > self.capacity_bytes:
            raise ResourceExhaustedError(
                "CACHE_FULL",
                f"the session would need {num_bytes} bytes for {len(cache.source) + num_tokens} tokens, and the other "
                f"{len(self) - 1} sessions hold {others} bytes, but this worker has room for {self.capacity_bytes}: "
                "end sessions, or raise --cache-bytes",
                retry_after_seconds=_RETRY_SECONDS,
            )
        self._reserved[cache] = num_bytes

    def give_up_largest(self) -> bool:
        """End the session with the largest cache by refusing its next request; return whether there is a session."""
        held = {cache: size for cache, size in tuple(self._reserved.items()) if size and cache not in self._given_up}
        if held:
            self._given_up.add(max(held, key=lambda cache: held[cache]))
        return bool(held)

    def discard(self, cache: SessionCache) -> None:
        """Forget the cache of a session that has ended."""
        self._reserved.pop(cache, None)
        self._given_up.discard(cache)

"""The target's memory for the caches of sessions, and the reserved part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, takewhile

from coordinator.sessions.place import ClientPlaces, Place
from specd.errors import InvalidRequestError


class Capacity:
    """Reserves memory of the target for all tokens to which a session can grow, so that every session can end."""

    def __init__(self, num_bytes: Callable[[], int], bytes_for: Callable[[int, int], int]) -> None:
        """`num_bytes` returns the target's present memory for caches, `bytes_for` the memory of tokens and source."""
        self.reserved_bytes = 0
        self._num_bytes = num_bytes
        self._bytes_for = bytes_for
        self._noticed = 0

    def notice(self) -> bool:
        """Return whether the target's memory has changed since the last call."""
        before, self._noticed = self._noticed, self._num_bytes()
        return self._noticed != before

    def fits_alone(self, num_tokens: int, num_source_tokens: int) -> bool:
        """Return whether a session of `num_tokens` fits into the target's cache alone."""
        return self._bytes_for(num_tokens, num_source_tokens) <= self._num_bytes()

    def measure(self, place: Place) -> InvalidRequestError | None:
        """Compute the bytes of a session that has yet to begin; return the error if it can never fit."""
        place.num_bytes, capacity = self._bytes_for(*place.num_tokens), self._num_bytes()
        if place.num_bytes <= capacity:
            return None
        return InvalidRequestError(
            "CACHE_EXCEEDED",
            f"the prompt and max_tokens make {sum(place.num_tokens)} tokens, which take {place.num_bytes} bytes, but "
            f"the target worker's cache has room for {capacity}: lower max_tokens, or raise the worker's --cache-bytes",
        )

    def fits(self, place: Place) -> bool:
        """Return whether a session fits beside the reserved ones."""
        return self.reserved_bytes + place.num_bytes <= self._num_bytes()

    def num_that_fit(self, places: Iterable[Place]) -> int:
        """Return how many of these sessions, in their order, fit beside the reserved ones."""
        room = self._num_bytes() - self.reserved_bytes
        needed = accumulate(place.num_bytes for place in places)
        return len([*takewhile(lambda num_bytes: num_bytes <= room, needed)])

    def share(self, client: ClientPlaces) -> float:
        """Return a client's share of the reserved memory."""
        return client.reserved_bytes / max(self._num_bytes(), 1)

    def reserve(self, place: Place) -> None:
        """Reserve the memory of a session that begins."""
        self.reserved_bytes += place.num_bytes
        place.client.reserved_bytes += place.num_bytes

    def release(self, place: Place) -> None:
        """Free the memory of a session that ends."""
        self.reserved_bytes -= place.num_bytes
        place.client.reserved_bytes -= place.num_bytes

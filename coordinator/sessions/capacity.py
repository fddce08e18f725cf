"""The memory that the target has for the caches of sessions, and how much of it is reserved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, takewhile

from coordinator.sessions.place import ClientPlaces, Place
from specd.errors import InvalidRequestError


class Capacity:
    """Reserves memory of the target for all tokens that a session can come to, so that one that has begun can end."""

    def __init__(self, num_bytes: Callable[[], int], bytes_for: Callable[[int, int], int]) -> None:
        """The target has `num_bytes` for caches, now, of which a session's tokens and source take `bytes_for`."""
        self.reserved_bytes = 0
        self._num_bytes = num_bytes
        self._bytes_for = bytes_for
        self._noticed = 0

    def notice(self) -> bool:
        """Return whether the target has another memory than when this was last asked."""
        before, self._noticed = self._noticed, self._num_bytes()
        return self._noticed != before

    def fits_alone(self, num_tokens: int, num_source_tokens: int) -> bool:
        """Return whether the target's cache has room for a session of `num_tokens`, if nothing else runs."""
        return self._bytes_for(num_tokens, num_source_tokens) <= self._num_bytes()

    def measure(self, place: Place) -> InvalidRequestError | None:
        """Note the bytes of a session that has yet to begin; return why it never will, if it cannot."""
        place.num_bytes, capacity = self._bytes_for(*place.num_tokens), self._num_bytes()
        if place.num_bytes <= capacity:
            return None
        return InvalidRequestError(
            "CACHE_EXCEEDED",
            f"the prompt and max_tokens make {sum(place.num_tokens)} tokens, which take {place.num_bytes} bytes, but "
            f"the target worker's cache has room for {capacity}: lower max_tokens, or raise the worker's --cache-bytes",
        )

    def fits(self, place: Place) -> bool:
        """Return whether there is room for a session beside the reserved ones."""
        return self.reserved_bytes + place.num_bytes <= self._num_bytes()

    def num_that_fit(self, places: Iterable[Place]) -> int:
        """Return how many of these sessions, in their order, there is room for beside the reserved ones."""
        room = self._num_bytes() - self.reserved_bytes
        needed = accumulate(place.num_bytes for place in places)
        return len([*takewhile(lambda num_bytes: num_bytes <= room, needed)])

    def share(self, client: ClientPlaces) -> float:
        """Return the part of the memory that a client has reserved."""
        return client.reserved_bytes / max(self._num_bytes(), 1)

    def reserve(self, place: Place) -> None:
        """Reserve the memory of a session that begins."""
        self.reserved_bytes += place.num_bytes
        place.client.reserved_bytes += place.num_bytes

    def release(self, place: Place) -> None:
        """Free the memory of a session that ends."""
        self.reserved_bytes -= place.num_bytes
        place.client.reserved_bytes -= place.num_bytes

"""The capacities of all targets together: places for sessions, and memory for their caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

from coordinator.sessions.capacity import Capacity
from coordinator.sessions.place import ClientPlaces, Place
from specd.errors import InvalidRequestError


class Capacities:
    """Gives sessions to targets, and reserves memory there for all tokens to which they can grow.

    So every session that begins can end.
    """

    def __init__(
        self,
        capacities: Callable[[], Sequence[Capacity]],
        choose: Callable[[Place, Sequence[Capacity]], Capacity],
    ) -> None:
        """`capacities` returns the capacity of each target that may get sessions, at least one.

        `choose` returns the best one for a session, among these where it fits, and sets the number of tokens that it
        prefills there.
        """
        self._capacities = capacities
        self._choose = choose
        self._noticed: list[int] = []
        self.moving: dict[Place, None] = {}  # the sessions that wait for a turn at another target

    @property
    def max_sessions(self) -> int:
        """The number of sessions that may run at the same time."""
        return sum(each.max_sessions for each in self._capacities())

    @property
    def num_bytes(self) -> int:
        """The memory for caches."""
        return sum(each.num_bytes() for each in self._capacities())

    @property
    def reserved_bytes(self) -> int:
        """The part of it that is reserved."""
        return sum(each.reserved_bytes for each in self._capacities())

    def seconds_per_token(self) -> Callable[[int], float]:
        """Return a function from a number of sessions to the time of a token, if they are spread over all targets."""
        capacities = self._capacities()

        @cache
        def slowest(num_sessions: int) -> float:
            return max(each.seconds_per_token(num_sessions) for each in capacities)

        return lambda num_sessions: slowest(-(-num_sessions // len(capacities)))

    def notice(self) -> bool:
        """Return whether the memory has changed since the last call."""
        before, self._noticed = self._noticed, [each.num_bytes() for each in self._capacities()]
        return self._noticed != before

    def measure(self, place: Place) -> InvalidRequestError | None:
        """Compute the bytes of a session that has yet to begin; return the error if it can never fit."""
        capacities = self._capacities()
        place.num_bytes = max(each.bytes_for(*place.num_tokens) for each in capacities)
        largest = max(each.num_bytes() for each in capacities)
        if place.num_bytes <= largest:
            return None
        return InvalidRequestError(
            "CACHE_EXCEEDED",
            f"the prompt and max_tokens make {sum(place.num_tokens)} tokens, which take {place.num_bytes} bytes, but "
            f"the target worker's cache has room for {largest}: lower max_tokens, or raise the worker's --cache-bytes",
        )

    def fits_alone(self, num_tokens: int, num_source_tokens: int) -> bool:
        """Return whether a session of `num_tokens` fits into an empty cache."""
        return any(each.bytes_for(num_tokens, num_source_tokens) <= each.num_bytes() for each in self._capacities())

    def fits(self, place: Place) -> bool:
        """Return whether a session that has yet to begin fits beside the reserved ones."""
        return bool(self._candidates(place))

    def num_that_fit(self, places: Iterable[Place]) -> int:
        """Return how many of these sessions, in their order, fit beside the reserved ones."""
        rooms, number = [each.free_bytes for each in self._capacities()], 0
        for place in places:
            i = max(range(len(rooms)), key=rooms.__getitem__)
            if rooms[i] < place.num_bytes:
                break
            rooms[i] -= place.num_bytes
            number += 1
        return number

    def share(self, client: ClientPlaces) -> float:
        """Return a client's share of the reserved memory."""
        return client.reserved_bytes / max(self.num_bytes, 1)

    def reserve(self, place: Place) -> None:
        """Give a session that begins, and fits, to a target."""
        place.capacity = capacity = self._choose(place, self._candidates(place))
        capacity.reserved_bytes += place.num_bytes
        place.client.reserved_bytes += place.num_bytes
        capacity.prefilling_tokens += place.num_prefilling

    def release(self, place: Place) -> None:
        """Free the memory of a session that ends, or leaves its target."""
        assert place.capacity is not None
        self.prefilled(place)
        place.capacity.reserved_bytes -= place.num_bytes
        place.client.reserved_bytes -= place.num_bytes
        place.capacity = None

    def prefilled(self, place: Place) -> None:
        """Note that a session's prefill is done, or no longer needed."""
        assert place.capacity is not None
        place.capacity.prefilling_tokens -= place.num_prefilling
        place.num_prefilling = 0

    def _candidates(self, place: Place) -> list[Capacity]:
        """Return where a session fits. Where all places are taken, it may be one more (see Fairness).

        New sessions leave the memory of a target to those that wait to move there.
        """
        capacities = self._capacities()
        is_full = not any(each.has_place for each in capacities)
        fitting = [
            each
            for each in capacities
            if place.num_bytes <= each.free_bytes and (each.has_place or is_full) and place.may_be_at(each)
        ]
        if place.has_begun or not self.moving:
            return fitting
        return [each for each in fitting if not any(other.may_be_at(each) for other in self.moving)]

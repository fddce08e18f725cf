"""Admission: which requests run, which wait, and which are turned away."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from specd.errors import InvalidRequestError, ResourceExhaustedError
from specd.step_costs import MovingAverage

_WEIGHT = 0.2  # of one session that ends, in the average time between two ends
_SHORTEST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 0.1, 60.0


@dataclass(eq=False)
class Place:
    """A request's place in the queue, and then among the running ones."""

    _admission: Admission
    _turn: asyncio.Future[None] | None = None
    _num_bytes: int = 0
    _runs: bool = False

    async def admit(self, num_tokens: int, num_source_tokens: int = 0) -> None:
        """Wait for the request's turn to run a session of so many tokens, prompt and generated, and of its source.

        Raises InvalidRequestError (CACHE_EXCEEDED) when it would never come.
        """
        await self._admission._admit(self, num_tokens, num_source_tokens)


class Admission:
    """Lets requests run while there is room for so many sessions, and for their tokens in the target's cache.

    A session reserves memory for all tokens that it can come to, so that one that has begun can end. The others wait,
    first come first served: small requests do not overtake a large one for ever. When too many wait, the next ones are
    turned away at once.
    """

    def __init__(
        self,
        *,
        max_sessions: int,
        max_queued: int,
        capacity_bytes: Callable[[], int],
        bytes_for: Callable[[int, int], int],
        clock: Callable[[], float],
    ) -> None:
        """The target has `capacity_bytes` for caches, now, of which a session's tokens and source take `bytes_for`."""
        self.num_running = 0
        self.reserved_bytes = 0
        self._num_present = 0
        self._max_sessions = max_sessions
        self._max_queued = max_queued
        self._capacity_bytes = capacity_bytes
        self._bytes_for = bytes_for
        self._clock = clock
        self._queue: deque[Place] = deque()
        self._last_end_at = 0.0  # of a session, or when the first request came
        self._seconds_between_ends = MovingAverage(_WEIGHT)

    @property
    def num_queued(self) -> int:
        """Requests that have come and do not run yet."""
        return self._num_present - self.num_running

    @contextmanager
    def place(self) -> Iterator[Place]:
        """Hold a place for a new request. Raises ResourceExhaustedError (QUEUE_FULL) when too many wait."""
        if self._num_present >= self._max_sessions + self._max_queued:
            # When those that wait now will have begun.
            seconds = (self.num_queued + 1) * self._seconds_between_ends.value
            raise ResourceExhaustedError(
                "QUEUE_FULL",
                f"{self.num_running} sessions run and {self.num_queued} requests wait, which is as many as may: "
                "try again later",
                retry_after_seconds=min(max(seconds, _SHORTEST_RETRY_SECONDS), _LONGEST_RETRY_SECONDS),
            )
        place = Place(self)
        if self._num_present == 0:
            self._last_end_at = self._clock()
        self._num_present += 1
        try:
            yield place
        finally:
            self._leave(place)

    async def _admit(self, place: Place, num_tokens: int, num_source_tokens: int) -> None:
        place._num_bytes = self._bytes_for(num_tokens, num_source_tokens)
        if place._num_bytes > (capacity := self._capacity_bytes()):
            raise InvalidRequestError(
                "CACHE_EXCEEDED",
                f"the prompt and max_tokens make {num_tokens + num_source_tokens} tokens, which take "
                f"{place._num_bytes} bytes, but the target worker's cache has room for {capacity}: lower max_tokens, "
                "or raise the worker's --cache-bytes",
            )
        place._turn = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        self._admit_next()
        await place._turn

    def _admit_next(self) -> None:
        while self._queue and self._has_room_for(self._queue[0]):
            place = self._queue.popleft()
            assert place._turn is not None
            if place._turn.cancelled():
                continue  # it is about to leave
            place._runs = True
            self.num_running += 1
            self.reserved_bytes += place._num_bytes
            place._turn.set_result(None)

    def _has_room_for(self, place: Place) -> bool:
        # The capacity can shrink when the worker comes back with less: one session runs in any case.
        fits = self.reserved_bytes + place._num_bytes <= self._capacity_bytes() or self.num_running == 0
        return self.num_running < self._max_sessions and fits

    def _leave(self, place: Place) -> None:
        self._num_present -= 1
        if place._runs:
            self.num_running -= 1
            self.reserved_bytes -= place._num_bytes
            now = self._clock()
            self._seconds_between_ends.add(now - self._last_end_at)
            self._last_end_at = now
        elif place in self._queue:
            self._queue.remove(place)
        self._admit_next()

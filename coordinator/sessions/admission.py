"""Admission: which requests run, which wait, and which are turned away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from coordinator.sessions.capacity import Capacity
from coordinator.sessions.fairness import Fairness
from coordinator.sessions.place import ClientPlaces, Place
from specd.errors import ResourceExhaustedError, SpecdError
from specd.step_costs import MovingAverage

_WEIGHT = 0.2  # of one session that ends, in the average time between two ends
# Rounds of a session before it yields to another of its client that waits to continue.
_ROUNDS_IN_A_ROW = 8
_SHORTEST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 0.1, 60.0


class Admission:
    """Lets requests run while there is room for one more session, and for its tokens in the target's cache.

    A session reserves memory for all tokens that it can come to (`Capacity`). The others wait: of one client, first
    come first served. Of several, `Fairness` decides.

    One client alone can use everything, until others come. Between two rounds a session then yields and pauses, if its
    client runs more than another that waits, or if more sessions run than all can afford (`affordable_sessions`). To
    continue needs no memory. Sessions of a client of which some have yielded alternate. A round can be long: so when
    all places are taken, one more is for a client that runs nothing while another runs several.

    When too many wait, the next ones are turned away at once, unless another client waits with more: then the latest of
    its requests yields.

    A session that waits for its client pauses, too, unless as many are paused as may run and wait: then it keeps its
    place.
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        max_sessions: int,
        max_queued: int,
        seconds_per_token: Callable[[int], float],
        clock: Callable[[], float],
    ) -> None:
        """`seconds_per_token` is the time of a token of each session, by the number of sessions that run together."""
        self.capacity = capacity
        self.num_running = self.num_paused = 0
        self._num_present = 0
        self._max_present = max_sessions + max_queued
        self._clock = clock
        self._clients: dict[str, ClientPlaces] = {}
        self._fairness = Fairness(
            self._clients.values(), capacity, max_sessions=max_sessions, seconds_per_token=seconds_per_token
        )
        self._turns = count()
        self._last_end_at = 0.0  # of a session, or when the first request came
        self._seconds_between_ends = MovingAverage(_WEIGHT)

    @property
    def num_queued(self) -> int:
        """Requests that have come and do not run yet."""
        return self._num_present - self.num_running - self.num_paused

    @contextmanager
    def place(self, name: str, max_sessions: int | None = None) -> Iterator[Place]:
        """Hold a place for a new request of the client of this name, which may have `max_sessions` at a time.

        Raises ResourceExhaustedError: CLIENT_SESSIONS when it has as many, QUEUE_FULL when too many wait.
        """
        client = self._clients.get(name) or ClientPlaces(next(self._turns))
        if max_sessions is not None and len(client.present) >= max_sessions:
            raise ResourceExhaustedError(
                "CLIENT_SESSIONS",
                f"{len(client.present)} requests of this client run or wait, which is as many as it may have: wait "
                "until one has ended",
                retry_after_seconds=self._until(1),
            )
        if self._num_present - self.num_paused >= self._max_present:
            self._make_way_for(client)
        place = Place(client)
        if self._num_present == 0:
            self._last_end_at = self._clock()
        self._clients[name] = client
        self._num_present += 1
        client.present[place] = None
        try:
            yield place
        finally:
            if place in client.present:  # it was not turned away
                self._leave(place)
            if not client.present and self._clients.get(name) is client:
                del self._clients[name]

    async def admit(self, place: Place, num_tokens: int, num_source_tokens: int = 0) -> None:
        """Wait for a request's turn to run a session of these tokens, prompt and generated ones, and of its source.

        Raises InvalidRequestError (CACHE_EXCEEDED) when it would never come, also when the target comes back with
        less memory while it waits, and ResourceExhaustedError (QUEUE_FULL) when it yields to a client that waits with
        fewer requests.
        """
        if place.refusal is not None:
            raise place.refusal
        place.num_tokens = num_tokens, num_source_tokens
        if (refusal := self.capacity.measure(place)) is not None:
            raise refusal
        place.turn = asyncio.get_running_loop().create_future()
        place.client.queue.append(place)
        self._admit_next()
        await place.turn

    def pause(self, place: Place) -> None:
        """Let others run, as long as a session has to wait for its client. It keeps its memory."""
        if place.is_running and self.num_paused < self._max_present:
            self._stop(place)
            self._admit_next()

    async def next_round(self, place: Place) -> None:
        """Wait until a session may continue, after a round or a pause: at once, unless it is another's turn."""
        client = place.client
        place.num_rounds += 1
        if place.is_running and len(self._clients) > 1:
            if self._fairness.yields(client):
                self._stop(place)
            elif place.num_rounds >= _ROUNDS_IN_A_ROW:
                place.num_rounds = 0
                client.drop_cancelled()
                if client.paused:
                    self._stop(place)
                    self._start(client.paused.popleft())
                self._admit_next()  # the cost of a batch may have changed
        if place.is_paused:
            place.turn = asyncio.get_running_loop().create_future()
            client.paused.append(place)
            self._admit_next()
            await place.turn

    def review(self) -> None:
        """Measure the queue again, and admit or refuse by the target's memory: it can come back with another.

        Any request that comes, pauses or leaves notices another capacity. This is for when none does.
        """
        self.capacity.notice()
        self._measure_queue()
        self._admit_next()

    def _make_way_for(self, client: ClientPlaces) -> None:
        """Turn away the latest request of the client with most waiting. Raises ResourceExhaustedError if that is this.

        It must wait with two more than this client: with one more, they would take turns.
        """

        def full(cause: str = "", **metadata: str) -> ResourceExhaustedError:
            return ResourceExhaustedError(
                "QUEUE_FULL",
                f"{self.num_running} sessions run and {self.num_queued} requests wait, which is as many as may{cause}: "
                "try again later",
                metadata=metadata,
                retry_after_seconds=self._until(self.num_queued + 1),  # when those that wait now will have begun
            )

        others = [other for other in self._clients.values() if other is not client]
        waiting = max((other.waiting for other in others), key=len, default=[])
        if len(waiting) < len(client.waiting) + 2:
            raise full()
        self._turn_away(
            waiting[-1], full(", and the request of a client that waits with fewer has come", gave_way="true")
        )

    def _turn_away(self, place: Place, refusal: SpecdError) -> None:
        place.refusal = refusal
        self._forget(place)
        if place.turn is not None and not place.turn.done():
            place.turn.set_exception(refusal)
            place.turn.exception()  # read: it may be cancelled before it sees it

    def _measure_queue(self) -> None:
        """Turn away the queued requests for which the target has no room any more, even when nothing else runs."""
        for client in [*self._clients.values()]:
            for place in [*client.queue]:
                if (refusal := self.capacity.measure(place)) is not None:
                    self._turn_away(place, refusal)

    def _until(self, num_ends: int) -> float:
        """Return in about how many seconds `num_ends` sessions will have ended, within reason."""
        seconds = num_ends * self._seconds_between_ends.value
        return min(max(seconds, _SHORTEST_RETRY_SECONDS), _LONGEST_RETRY_SECONDS)

    def _stop(self, place: Place) -> None:
        place.is_running, place.is_paused = False, True
        self.num_running -= 1
        place.client.num_running -= 1
        self.num_paused += 1

    def _start(self, place: Place) -> None:
        client = place.client
        if place.is_paused:
            self.num_paused -= 1
        else:
            self.capacity.reserve(place)
        place.is_running, place.is_paused, place.num_rounds = True, False, 0
        self.num_running += 1
        client.num_running += 1
        client.turn = next(self._turns)
        assert place.turn is not None
        place.turn.set_result(None)

    def _admit_next(self) -> None:
        if self.capacity.notice():
            self._measure_queue()
        while (client := self._fairness.next()) is not None:
            self._start((client.paused or client.queue).popleft())

    def _leave(self, place: Place) -> None:
        has_run = place.is_running or place.is_paused
        self._forget(place)
        if has_run:
            now = self._clock()
            self._seconds_between_ends.add(now - self._last_end_at)
            self._last_end_at = now
        self._admit_next()

    def _forget(self, place: Place) -> None:
        client = place.client
        self._num_present -= 1
        del client.present[place]
        for waiting in (client.paused, client.queue):
            if place in waiting:
                waiting.remove(place)
        if place.is_running or place.is_paused:
            self.capacity.release(place)
        if place.is_running:
            self.num_running -= 1
            client.num_running -= 1
        self.num_paused -= place.is_paused
        place.is_running = place.is_paused = False

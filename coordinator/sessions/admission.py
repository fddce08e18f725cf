"""Admission: the decision which requests run, wait, or are turned away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from coordinator.sessions.capacities import Capacities
from coordinator.sessions.capacity import Capacity
from coordinator.sessions.fairness import Fairness
from coordinator.sessions.place import ClientPlaces, Place
from coordinator.sessions.request_counts import RequestCounts
from specd.errors import ResourceExhaustedError, SpecdError
from specd.step_costs import MovingAverage

_WEIGHT = 0.2  # of one end in the average time between two ends of sessions
# Rounds of a session before it yields to another session of its client that waits to continue.
_ROUNDS_IN_A_ROW = 8
_SHORTEST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 0.1, 60.0


class Admission:
    """Lets requests run while there is room for one more session, and for its tokens in a target's cache.

    A session reserves memory for all tokens to which it can grow (`Capacities`). The others wait. Requests of one
    client run in their order, and between clients `Fairness` decides.

    One client alone can use everything, until others come. Between two rounds a session then yields and pauses, if its
    client runs more sessions than a waiting client, or if more sessions run than all can afford
    (`affordable_sessions`). A session that continues needs no new memory. If some sessions of a client have yielded,
    its sessions alternate. A round can be long, so when all places are taken, one more is for a client that runs
    nothing while another runs several.

    When too many requests wait, the next ones are turned away at once, unless another client has more waiting requests:
    then its latest one is turned away.

    A session that waits for its client to read pauses too, unless too many are paused already: then it keeps its place.

    A session that leaves its target waits for its turn at another one, before its client's requests.
    """

    def __init__(
        self,
        capacities: Capacities,
        *,
        max_queued: int,
        clock: Callable[[], float],
        num_requests: RequestCounts | None = None,
    ) -> None:
        """`num_requests` counts the requests of each client, also those for other models."""
        self._num_requests = RequestCounts() if num_requests is None else num_requests
        self.capacities = capacities
        self.num_running = self.num_paused = 0
        self._num_present = 0
        self._max_queued = max_queued
        self._clock = clock
        self._clients: dict[str, ClientPlaces] = {}
        self._fairness = Fairness(self._clients.values(), capacities)
        self._turns = count()
        self._last_end_at = 0.0  # the last end of a session, or the time of the first request
        self._seconds_between_ends = MovingAverage(_WEIGHT)

    @property
    def num_queued(self) -> int:
        """The number of requests that do not run yet."""
        return self._num_present - self.num_running - self.num_paused

    @property
    def _max_present(self) -> int:
        return self.capacities.max_sessions + self._max_queued

    @contextmanager
    def place(self, name: str, max_sessions: int | None = None) -> Iterator[Place]:
        """Hold a place for a new request of the client `name`, which may have `max_sessions` at a time.

        Raises ResourceExhaustedError: CLIENT_SESSIONS if the client has too many, QUEUE_FULL if too many wait.
        """
        client = self._clients.get(name) or ClientPlaces(next(self._turns))
        self._num_requests.check(name, max_sessions, self._until(1))
        if self._num_present - self.num_paused >= self._max_present:
            self._make_way_for(client)
        place = Place(client)
        if self._num_present == 0:
            self._last_end_at = self._clock()
        self._clients[name] = client
        self._num_present += 1
        self._num_requests.begin(name)
        client.present[place] = None
        try:
            yield place
        finally:
            self._num_requests.end(name)
            if place in client.present:  # the request was not turned away
                self._leave(place)
            if not client.present and self._clients.get(name) is client:
                del self._clients[name]

    async def admit(self, place: Place, num_tokens: int, num_source_tokens: int = 0) -> None:
        """Wait for the turn of a request, for a session with these tokens, prompt and generated ones, and its source.

        Raises InvalidRequestError (CACHE_EXCEEDED) if the session can never fit, also when the target comes back with
        less memory during the wait, and ResourceExhaustedError (QUEUE_FULL) when the request yields to a client with
        fewer waiting requests.
        """
        if place.refusal is not None:
            raise place.refusal
        place.num_tokens = num_tokens, num_source_tokens
        if (refusal := self.capacities.measure(place)) is not None:
            raise refusal
        place.turn = asyncio.get_running_loop().create_future()
        place.client.queue.append(place)
        self._admit_next()
        await place.turn

    async def move(self, place: Place, may_be_at: Callable[[Capacity], bool]) -> None:
        """Wait for the turn of a running session at one of these targets, and free its place where it was."""
        self._free(place)
        place.may_be_at = may_be_at
        place.turn = asyncio.get_running_loop().create_future()
        place.client.moving.append(place)
        self.capacities.moving[place] = None
        self._admit_next()
        await place.turn

    def pause(self, place: Place) -> None:
        """Let others run while a session waits for its client. It keeps its memory."""
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
        """Measure the queue again, and admit or refuse by the targets' memory, which can change with a restart.

        Each request that comes, pauses or leaves also notices a changed capacity. This is for times without requests.
        """
        self.capacities.notice()
        self._measure_queue()
        self._admit_next()

    def _make_way_for(self, client: ClientPlaces) -> None:
        """Turn away the latest request of the client with most waiting requests.

        That client must have two more than `client`: with one more, the two would turn each other away. Raises
        ResourceExhaustedError if `client` itself has to be turned away.
        """

        def full(cause: str = "", **metadata: str) -> ResourceExhaustedError:
            return ResourceExhaustedError(
                "QUEUE_FULL",
                f"{self.num_running} sessions run and {self.num_queued} requests wait, and no more may wait{cause}: "
                "try again later",
                metadata=metadata,
                retry_after_seconds=self._until(self.num_queued + 1),  # the present queue will have begun by then
            )

        others = [other for other in self._clients.values() if other is not client]
        waiting = max((other.waiting for other in others), key=len, default=[])
        if len(waiting) < len(client.waiting) + 2:
            raise full()
        self._turn_away(waiting[-1], full(", and a client with fewer waiting requests has sent one", gave_way="true"))

    def _turn_away(self, place: Place, refusal: SpecdError) -> None:
        place.refusal = refusal
        self._forget(place)
        if place.turn is not None and not place.turn.done():
            place.turn.set_exception(refusal)
            place.turn.exception()  # mark it as read, because the request may be cancelled before it reads it

    def _measure_queue(self) -> None:
        """Turn away the queued requests that no longer fit into a target's cache, even alone."""
        for client in [*self._clients.values()]:
            for place in [*client.queue]:
                if (refusal := self.capacities.measure(place)) is not None:
                    self._turn_away(place, refusal)

    def _until(self, num_ends: int) -> float:
        """Return an estimate, within bounds, of the seconds until `num_ends` sessions have ended."""
        seconds = num_ends * self._seconds_between_ends.value
        return min(max(seconds, _SHORTEST_RETRY_SECONDS), _LONGEST_RETRY_SECONDS)

    def _stop(self, place: Place) -> None:
        assert place.capacity is not None
        place.is_running, place.is_paused = False, True
        self.num_running -= 1
        place.client.num_running -= 1
        place.capacity.num_running -= 1
        self.num_paused += 1

    def _start(self, place: Place) -> None:
        client = place.client
        if place.is_paused:
            self.num_paused -= 1
        else:
            self.capacities.reserve(place)
            self.capacities.moving.pop(place, None)
        assert place.capacity is not None
        place.is_running, place.is_paused, place.has_begun, place.num_rounds = True, False, True, 0
        self.num_running += 1
        client.num_running += 1
        place.capacity.num_running += 1
        client.turn = next(self._turns)
        assert place.turn is not None
        place.turn.set_result(None)

    def _admit_next(self) -> None:
        if self.capacities.notice():
            self._measure_queue()
        while (place := self._fairness.next()) is not None:
            self._start(place)

    def _leave(self, place: Place) -> None:
        self._forget(place)
        if place.has_begun:
            now = self._clock()
            self._seconds_between_ends.add(now - self._last_end_at)
            self._last_end_at = now
        self._admit_next()

    def _forget(self, place: Place) -> None:
        client = place.client
        self._num_present -= 1
        del client.present[place]
        self.capacities.moving.pop(place, None)
        for waiting in (client.paused, client.moving, client.queue):
            if place in waiting:
                waiting.remove(place)
        self._free(place)

    def _free(self, place: Place) -> None:
        """Free the place and the memory of a session, if it has them."""
        if place.capacity is None:
            return
        if place.is_running:
            self.num_running -= 1
            place.client.num_running -= 1
            place.capacity.num_running -= 1
        self.num_paused -= place.is_paused
        place.is_running = place.is_paused = False
        self.capacities.release(place)

"""Admission: which requests run, which wait, and which are turned away."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, count, islice, takewhile

from coordinator.sessions.shares import affordable_sessions
from specd.errors import InvalidRequestError, ResourceExhaustedError, SpecdError
from specd.step_costs import MovingAverage

_WEIGHT = 0.2  # of one session that ends, in the average time between two ends
# Rounds of a session before it gives way to another of its client that waits to go on.
_ROUNDS_IN_A_ROW = 8
_SHORTEST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 0.1, 60.0


@dataclass(eq=False)
class Place:
    """A request's place in the queue, and then among the running ones."""

    _admission: Admission
    _client: _Client
    _turn: asyncio.Future[None] | None = None
    _num_tokens: tuple[int, int] = (0, 0)  # of the session, and of its source
    _num_bytes: int = 0
    _runs: bool = False
    _pauses: bool = False
    _num_rounds: int = 0  # since it began or went on
    _refusal: SpecdError | None = None

    @property
    def is_paused(self) -> bool:
        """Whether the session waits for its client to read, or for its turn to go on."""
        return self._pauses

    async def admit(self, num_tokens: int, num_source_tokens: int = 0) -> None:
        """Wait for the request's turn to run a session of so many tokens, prompt and generated, and of its source.

        Raises InvalidRequestError (CACHE_EXCEEDED) when it would never come, also when the target comes back with
        less memory meanwhile, and ResourceExhaustedError (QUEUE_FULL) when it gives way to a client that waits with
        fewer requests.
        """
        await self._admission._admit(self, num_tokens, num_source_tokens)

    def pause(self) -> None:
        """Let others run, as long as the session has to wait for its client. It keeps its memory."""
        self._admission._pause(self)

    async def next_round(self) -> None:
        """Wait until the session may go on, after a round or a pause: at once, unless it is others' turn."""
        await self._admission._next_round(self)


@dataclass(eq=False)
class _Client:
    """What one client has at a time. `turn` counts up with each of its requests that begins to run."""

    turn: int
    num_running: int = 0
    reserved_bytes: int = 0
    present: dict[Place, None] = field(default_factory=dict)  # as they came
    paused: deque[Place] = field(default_factory=deque)  # those that wait for their turn to go on
    queue: deque[Place] = field(default_factory=deque)  # those that wait for their turn to begin

    @property
    def waiting(self) -> list[Place]:
        """Those that have come and do not run yet."""
        return [place for place in self.present if not place._runs and not place._pauses]


class Admission:
    """Lets requests run while there is room for so many sessions, and for their tokens in the target's cache.

    A session reserves memory for all tokens that it can come to, so that one that has begun can end. The others wait:
    of one client, first come first served. Of several, the one that has least of what it has most of, places or memory,
    goes next (dominant resource fairness, Ghodsi et al., NSDI 2011), and of those with as little the one whose last
    turn is longest ago. Nobody overtakes whose turn it is: small requests do not keep a large one waiting for ever.

    One client alone can use everything, until others come. Between two rounds a session then gives way and pauses, if
    its client runs more than another that waits, or if more sessions run than all can afford (`affordable_sessions`).
    To go on needs no memory. Sessions of a client of which some gave way alternate. A round can be long: so when all
    places are taken, one more is for a client that runs nothing while another runs several.

    When too many wait, the next ones are turned away at once, unless another client waits with more: then the latest of
    its requests gives way.

    A session that waits for its client pauses, too, unless as many are paused as may run and wait: then it keeps its
    place.
    """

    def __init__(
        self,
        *,
        max_sessions: int,
        max_queued: int,
        capacity_bytes: Callable[[], int],
        bytes_for: Callable[[int, int], int],
        seconds_per_token: Callable[[int], float],
        clock: Callable[[], float],
    ) -> None:
        """The target has `capacity_bytes` for caches, now, of which a session's tokens and source take `bytes_for`.

        `seconds_per_token` is what a token takes, of each of so many sessions that run together.
        """
        self.num_running = self.num_paused = 0
        self.reserved_bytes = 0
        self._measured_for = 0  # the capacity for which the queue was last measured
        self._num_present = 0
        self._max_sessions = max_sessions
        self._max_present = max_sessions + max_queued
        self._capacity_bytes = capacity_bytes
        self._bytes_for = bytes_for
        self._seconds_per_token = seconds_per_token
        self._clock = clock
        self._clients: dict[str, _Client] = {}
        self._turns = count()
        self._last_end_at = 0.0  # of a session, or when the first request came
        self._seconds_between_ends = MovingAverage(_WEIGHT)

    @property
    def num_queued(self) -> int:
        """Requests that have come and do not run yet."""
        return self._num_present - self.num_running - self.num_paused

    @contextmanager
    def place(self, name: str, max_sessions: int | None = None) -> Iterator[Place]:
        """Hold a place for a new request of the client of this name, which may have so many at a time.

        Raises ResourceExhaustedError: CLIENT_SESSIONS when it has as many, QUEUE_FULL when too many wait.
        """
        client = self._clients.get(name) or _Client(next(self._turns))
        if max_sessions is not None and len(client.present) >= max_sessions:
            raise ResourceExhaustedError(
                "CLIENT_SESSIONS",
                f"{len(client.present)} requests of this client run or wait, which is as many as it may have: wait "
                "until one has ended",
                retry_after_seconds=self._until(1),
            )
        if self._num_present - self.num_paused >= self._max_present:
            self._make_way_for(client)
        place = Place(self, client)
        if self._num_present == 0:
            self._last_end_at = self._clock()
        self._clients[name] = client
        self._num_present += 1
        client.present[place] = None
        try:
            yield place
        finally:
            if place in client.present:  # it has not given way
                self._leave(place)
            if not client.present and self._clients.get(name) is client:
                del self._clients[name]

    def _make_way_for(self, client: _Client) -> None:
        """Turn away the latest request of whoever has most waiting. Raises ResourceExhaustedError if it is no other."""

        def full(cause: str = "", **metadata: str) -> ResourceExhaustedError:
            return ResourceExhaustedError(
                "QUEUE_FULL",
                f"{self.num_running} sessions run and {self.num_queued} requests wait, which is as many as may{cause}: "
                "try again later",
                metadata=metadata,
                retry_after_seconds=self._until(self.num_queued + 1),  # when those that wait now will have begun
            )

        waiting = max((other.waiting for other in self._others(client)), key=len, default=[])
        if len(waiting) < len(client.waiting) + 2:
            raise full()
        self._turn_away(
            waiting[-1], full(", and the request of a client that waits with fewer has come", gave_way="true")
        )

    def _turn_away(self, place: Place, refusal: SpecdError) -> None:
        place._refusal = refusal
        self._forget(place)
        if place._turn is not None and not place._turn.done():
            place._turn.set_exception(refusal)
            place._turn.exception()  # read: it may be cancelled before it sees it

    def fits_alone(self, num_tokens: int, num_source_tokens: int) -> bool:
        """Say whether the target's cache has room for a session of `num_tokens`, if nothing else runs."""
        return self._bytes_for(num_tokens, num_source_tokens) <= self._capacity_bytes()

    def review(self) -> None:
        """Measure the queue again, and admit or refuse by what the target has now: it can come back with other memory.

        Whatever a client does notices another capacity. This is for when none does anything.
        """
        self._measure_queue()
        self._admit_next()

    def _measure_queue(self) -> None:
        """Turn away the queued requests for which the target has no room any more, even when nothing else runs."""
        self._measured_for = self._capacity_bytes()
        for client in [*self._clients.values()]:
            for place in [*client.queue]:
                if (refusal := self._measure(place)) is not None:
                    self._turn_away(place, refusal)

    def _measure(self, place: Place) -> InvalidRequestError | None:
        """Note the bytes of a session that has yet to begin; return why it never will, if it cannot."""
        place._num_bytes, capacity = self._bytes_for(*place._num_tokens), self._capacity_bytes()
        if place._num_bytes <= capacity:
            return None
        return InvalidRequestError(
            "CACHE_EXCEEDED",
            f"the prompt and max_tokens make {sum(place._num_tokens)} tokens, which take {place._num_bytes} bytes, but "
            f"the target worker's cache has room for {capacity}: lower max_tokens, or raise the worker's --cache-bytes",
        )

    def _until(self, num_ends: int) -> float:
        """Return in how many seconds so many sessions will have ended, about, within reason."""
        seconds = num_ends * self._seconds_between_ends.value
        return min(max(seconds, _SHORTEST_RETRY_SECONDS), _LONGEST_RETRY_SECONDS)

    async def _admit(self, place: Place, num_tokens: int, num_source_tokens: int) -> None:
        if place._refusal is not None:
            raise place._refusal
        place._num_tokens = num_tokens, num_source_tokens
        if (refusal := self._measure(place)) is not None:
            raise refusal
        place._turn = asyncio.get_running_loop().create_future()
        place._client.queue.append(place)
        self._admit_next()
        await place._turn

    def _pause(self, place: Place) -> None:
        if place._runs and self.num_paused < self._max_present:
            self._stop(place)
            self._admit_next()

    async def _next_round(self, place: Place) -> None:
        client = place._client
        place._num_rounds += 1
        if place._runs and len(self._clients) > 1:
            if self._gives_way(client):
                self._stop(place)
            elif place._num_rounds >= _ROUNDS_IN_A_ROW:
                place._num_rounds = 0
                _drop_cancelled(client.paused)
                if client.paused:
                    self._stop(place)
                    self._start(client.paused.popleft())
                self._admit_next()  # what a batch costs may have changed
        if place._pauses:
            place._turn = asyncio.get_running_loop().create_future()
            client.paused.append(place)
            self._admit_next()
            await place._turn

    def _gives_way(self, client: _Client) -> bool:
        """Return whether a client runs more than its part."""
        runnable, others = self._runnable(), self._others(client)
        if self.num_running > self._affordable(runnable):
            return client.num_running >= max(other.num_running for other in others)
        rest = (client.num_running - 1) / self._max_sessions
        return any(self._share(other) < rest for other in runnable if other is not client)

    def _stop(self, place: Place) -> None:
        place._runs, place._pauses = False, True
        self.num_running -= 1
        place._client.num_running -= 1
        self.num_paused += 1

    def _start(self, place: Place) -> None:
        client = place._client
        if place._pauses:
            self.num_paused -= 1
        else:
            self.reserved_bytes += place._num_bytes
            client.reserved_bytes += place._num_bytes
        place._runs, place._pauses, place._num_rounds = True, False, 0
        self.num_running += 1
        client.num_running += 1
        client.turn = next(self._turns)
        assert place._turn is not None
        place._turn.set_result(None)

    def _admit_next(self) -> None:
        if self._capacity_bytes() != self._measured_for:
            self._measure_queue()
        while (client := self._next()) is not None:
            self._start((client.paused or client.queue).popleft())

    def _next(self) -> _Client | None:
        """Return whose turn it is, if there is room for one more."""
        runnable = self._runnable()
        if not runnable or self.num_running > self._max_sessions:
            return None
        if self.num_running < self._affordable(runnable):
            return runnable[0]
        if all(client.num_running <= 1 for client in self._clients.values()):
            return None
        return next((client for client in runnable if not client.num_running), None)

    def _runnable(self) -> list[_Client]:
        """Return the clients that wait for a place and not for memory, in the order of their turns."""
        waiting = [client for client in self._clients.values() if client.paused or client.queue]
        runnable, is_blocked = [], False
        for client in sorted(waiting, key=lambda each: (self._share(each), each.turn)):
            _drop_cancelled(client.paused)
            _drop_cancelled(client.queue)
            if client.paused or (client.queue and not is_blocked and self._fits(client.queue[0])):
                runnable.append(client)  # who goes on has its memory, and may hold what another waits for
            elif client.queue:
                is_blocked = True
        return runnable

    def _affordable(self, runnable: list[_Client]) -> int:
        """Return how many sessions may run, while these clients wait for a place."""
        can_run = set(runnable)
        clients = [client for client in self._clients.values() if client.num_running or client in can_run]
        if len(clients) < 2:
            return self._max_sessions
        wanted = [client.num_running + len(client.paused) + self._num_queued_that_fit(client) for client in clients]
        return affordable_sessions(wanted, self._max_sessions, self._seconds_per_token)

    def _share(self, client: _Client) -> float:
        """Return a client's share of what it has most of: places or memory. Who goes on needs no memory."""
        places = client.num_running / self._max_sessions
        return places if client.paused else max(places, client.reserved_bytes / max(self._capacity_bytes(), 1))

    def _fits(self, place: Place) -> bool:
        return self.reserved_bytes + place._num_bytes <= self._capacity_bytes()

    def _num_queued_that_fit(self, client: _Client) -> int:
        room = self._capacity_bytes() - self.reserved_bytes
        needed = accumulate(place._num_bytes for place in islice(client.queue, self._max_sessions))
        return len([*takewhile(lambda num_bytes: num_bytes <= room, needed)])

    def _others(self, client: _Client) -> list[_Client]:
        return [other for other in self._clients.values() if other is not client]

    def _leave(self, place: Place) -> None:
        has_run = place._runs or place._pauses
        self._forget(place)
        if has_run:
            now = self._clock()
            self._seconds_between_ends.add(now - self._last_end_at)
            self._last_end_at = now
        self._admit_next()

    def _forget(self, place: Place) -> None:
        client = place._client
        self._num_present -= 1
        del client.present[place]
        for waiting in (client.paused, client.queue):
            if place in waiting:
                waiting.remove(place)
        if place._runs or place._pauses:
            self.reserved_bytes -= place._num_bytes
            client.reserved_bytes -= place._num_bytes
        if place._runs:
            self.num_running -= 1
            client.num_running -= 1
        self.num_paused -= place._pauses
        place._runs = place._pauses = False


def _drop_cancelled(waiting: deque[Place]) -> None:
    """Drop those at the head that are about to leave."""
    while waiting and (turn := waiting[0]._turn) is not None and turn.cancelled():
        waiting.popleft()

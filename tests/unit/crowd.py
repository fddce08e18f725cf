"""A crowd of requests to one Admission, each of which a test sees come, wait, run and leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from coordinator.sessions.admission import Admission
from coordinator.sessions.capacities import Capacities
from coordinator.sessions.capacity import Capacity
from coordinator.sessions.place import Place
from specd.errors import InvalidRequestError, ResourceExhaustedError


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Request:
    """Comes, asks for its turn, runs until it is told to end, and leaves."""

    def __init__(self, crowd: Crowd, client: str = "") -> None:
        self.client = client
        self.num_tokens = 0
        self.refusal: ResourceExhaustedError | InvalidRequestError | None = None
        self._crowd = crowd
        self._asks: asyncio.Future[int] = crowd.loop.create_future()
        self._ends: asyncio.Future[None] = crowd.loop.create_future()
        self._place: Place | None = None
        self._going_on: asyncio.Task[None] | None = None
        self.task = crowd.loop.create_task(self._live())

    @property
    def has_asked(self) -> bool:
        return self._asks.done()

    @property
    def is_cancelled(self) -> bool:
        return self.task.cancelling() > 0

    @property
    def reason(self) -> str:
        return "" if self.refusal is None else self.refusal.reason

    @property
    def refusal_metadata(self) -> dict[str, str]:
        return {} if self.refusal is None else self.refusal.metadata

    @property
    def retry_after_seconds(self) -> float:
        return 0.0 if self.refusal is None else self.refusal.retry_after_seconds

    def ask(self, num_tokens: int) -> None:
        self._asks.set_result(num_tokens)

    def end(self, error: Exception | None = None) -> None:
        if self._ends.done():
            return
        if error is None:
            self._ends.set_result(None)
        else:
            self._ends.set_exception(error)

    def pause(self) -> None:
        """Wait for its client; where as many as may do so already, it stays where it is."""
        assert self._place is not None
        self._crowd.admission.pause(self._place)
        if self._place.is_paused:
            self._crowd.running.remove(self)
            self._crowd.paused.append(self)

    @property
    def goes_on(self) -> bool:
        """Whether it waits for its turn to continue."""
        return self._going_on is not None and not self._going_on.done()

    def next_round(self) -> None:
        """Go on, after a pause or a round."""
        assert self._place is not None
        self._going_on = self._crowd.loop.create_task(self._go_on(self._place))

    def stop_waiting(self) -> None:
        """Stop waiting for the turn to continue."""
        if self._going_on is not None:
            self._going_on.cancel()

    async def _go_on(self, place: Place) -> None:
        crowd = self._crowd
        turn = crowd.loop.create_task(crowd.admission.next_round(place))
        await asyncio.sleep(0)
        try:
            if place.is_paused and self in crowd.running:
                crowd.running.remove(self)
                crowd.paused.append(self)
            await turn
            if self in crowd.paused:  # it may have left during the wait
                crowd.paused.remove(self)
                crowd.running.append(self)
        finally:
            turn.cancel()

    async def _live(self) -> None:
        crowd = self._crowd
        is_full = len(crowd.present) - len(crowd.paused) >= crowd.max_sessions + crowd.max_queued
        expected_reason = "QUEUE_FULL" if is_full and not crowd.has_several_clients else ""
        try:
            with crowd.admission.place(self.client) as place:
                self._place = place
                crowd.present.append(self)
                try:
                    self.num_tokens = await self._asks
                    crowd.waiting.append(self)
                    crowd.noticed_capacity = crowd.capacity
                    await crowd.admission.admit(place, self.num_tokens)
                    crowd.begin(self)
                    await self._ends
                finally:
                    self.stop_waiting()
                    crowd.forget(self)
        except (ResourceExhaustedError, InvalidRequestError) as error:
            self.refusal = error
        if self.reason == "CACHE_EXCEEDED":
            # By what the worker has now: it can have come back with less while this one waited.
            assert self.num_tokens * crowd.bytes_per_token > crowd.capacity
        elif not crowd.has_several_clients:  # with several clients, one may yield to another
            assert self.reason == expected_reason


class Crowd:
    """Requests to one Admission, the books on them kept apart, and the rules that hold at each admission."""

    def __init__(
        self,
        *,
        max_sessions: int = 4,
        max_queued: int = 1000,
        capacity: int = 10,
        seconds_per_token: Callable[[int], float] = lambda _: 1.0,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.max_sessions = max_sessions
        self.max_queued = max_queued
        self.capacity = capacity
        self.bytes_per_token = 1
        self.clock = Clock()
        self.loop = loop or asyncio.get_running_loop()
        capacity_of_target = Capacity(
            lambda: self.capacity,
            lambda num_tokens, num_source_tokens: (num_tokens + num_source_tokens) * self.bytes_per_token,
            max_sessions=max_sessions,
            seconds_per_token=seconds_per_token,
        )
        capacities = Capacities(lambda: [capacity_of_target], lambda place, capacities: capacities[0])
        self.admission = Admission(capacities, max_queued=max_queued, clock=self.clock)
        self.everyone: list[Request] = []
        self.present: list[Request] = []
        self.waiting: list[Request] = []  # in the order in which they asked
        self.running: list[Request] = []  # in the order in which they began
        self.paused: list[Request] = []
        self.begun: list[Request] = []  # all that ever ran, in the order in which they began
        self.overtaken: list[Request] = []
        self.noticed_capacity = capacity  # at the last request or departure

    @property
    def has_several_clients(self) -> bool:
        return len({request.client for request in self.everyone}) > 1

    async def __aenter__(self) -> Crowd:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for request in self.everyone:
            request.task.cancel()
        outcomes = await asyncio.gather(*(request.task for request in self.everyone), return_exceptions=True)
        if error is None:
            assert [outcome for outcome in outcomes if isinstance(outcome, AssertionError)] == []
            self.check_books()
            assert (
                self.admission.num_running,
                self.admission.num_queued,
                self.admission.capacities.reserved_bytes,
            ) == (
                0,
                0,
                0,
            )

    def come(self, num_tokens: int | None = 1, client: str = "") -> Request:
        """Let a request come, which asks for its turn at once, or not yet."""
        request = Request(self, client)
        self.everyone.append(request)
        if num_tokens is not None:
            request.ask(num_tokens)
        return request

    def begin(self, request: Request) -> None:
        # A session that runs as soon as it asks continues before the sessions that its request admits.
        ahead = [one for one in self.waiting[: self.waiting.index(request)] if one.client == request.client]
        self.loop.call_soon(self._note_overtaken, ahead)
        self.waiting.remove(request)
        assert request not in self.running
        self.running.append(request)
        self.begun.append(request)
        assert len(self.running) <= self.max_sessions + self.has_several_clients
        assert sum(one.num_tokens for one in self.running) <= self.capacity

    def _note_overtaken(self, ahead: list[Request]) -> None:
        self.overtaken += [one for one in ahead if one in self.waiting and not one.is_cancelled]

    def forget(self, request: Request) -> None:
        self.noticed_capacity = self.capacity
        for those in (self.present, self.waiting, self.running, self.paused):
            if request in those:
                those.remove(request)

    def check_books(self) -> None:
        """Check the admission's numbers against ours, once no session is between two states."""
        assert self.admission.num_running == len(self.running)
        assert self.admission.num_paused == len(self.paused)
        assert self.admission.capacities.reserved_bytes == sum(
            request.num_tokens for request in (*self.running, *self.paused)
        )
        assert self.admission.num_queued == len(self.present) - len(self.running) - len(self.paused)
        assert self.overtaken == []


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)

"""Requests that wait for their models, and then use them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable

from coordinator.coordinator import Coordinator
from coordinator.models.loader import LoadProgress
from coordinator.models.served_model import ServedModel
from coordinator.sessions.request_counts import RequestCounts
from specd.caller import Caller
from specd.errors import ResourceExhaustedError, SpecdError, UnavailableError

_PROGRESS_SECONDS = 0.2
_RETRY_SECONDS = 5.0
_MOST_WAITING = 256  # requests for one model


class Waiting:
    """A request that waits for its model, and then uses it."""

    def __init__(self, model: ServedModel, caller: Caller, progress: Callable[[ServedModel], LoadProgress]) -> None:
        """`progress` returns how far the start of a model is."""
        self.model = model  # another one from the time when that has replaced it
        self.caller = caller
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_admitted = False
        self._progress = progress

    async def ready(self) -> Coordinator:
        """Wait for the model. Raises UnavailableError if it cannot be loaded."""
        await self.turn
        if self.model.coordinator is None:
            raise UnavailableError("MODEL_NOT_LOADED", f"the model {self.model.name!r} has lost its workers")
        return self.model.coordinator

    async def progress(self) -> AsyncIterator[LoadProgress]:
        """Yield how far the model is until it is there, or cannot be loaded."""
        last = None
        while not self.turn.done():
            now = self._progress(self.model)
            if now != last:
                last = now
                yield now
            await asyncio.wait({self.turn}, timeout=_PROGRESS_SECONDS)


class Requests:
    """The requests of all models.

    When too many wait for a model, the next ones are turned away at once, unless another client has at least two more
    that wait: then that client's latest request is turned away, as by `Admission`.
    """

    def __init__(self, num_requests: RequestCounts) -> None:
        """`num_requests` counts the requests of each client, also those that run."""
        self._num_requests = num_requests
        self._waiting: defaultdict[ServedModel, list[Waiting]] = defaultdict(list)

    def check_room(self, model: ServedModel, caller: Caller) -> None:
        """Make room for a request that waits for a model.

        Raises ResourceExhaustedError: CLIENT_SESSIONS if the client has too many requests, QUEUE_FULL if too many wait.
        """
        self._num_requests.check(caller.name, caller.limits.max_sessions, _RETRY_SECONDS)
        waiting = self._waiting[model]
        if len(waiting) < _MOST_WAITING:
            return
        full = ResourceExhaustedError(
            "QUEUE_FULL",
            f"{_MOST_WAITING} requests wait for the model {model.name!r}, and no more may wait: try again later",
            retry_after_seconds=_RETRY_SECONDS,
        )
        counts = Counter(each.caller.name for each in waiting)
        ((client, number),) = counts.most_common(1)
        if number < counts[caller.name] + 2:
            raise full
        latest = next(each for each in reversed(waiting) if each.caller.name == client)
        waiting.remove(latest)
        self._num_requests.end(client)
        latest.turn.set_exception(full)

    def wait(self, waiting: Waiting) -> None:
        """Let a request wait for its model."""
        self._waiting[waiting.model].append(waiting)
        self._num_requests.begin(waiting.caller.name)

    def admit(self, waiting: Waiting) -> None:
        """Let a request use its model, where its place in the admission counts it."""
        waiting.is_admitted = True
        waiting.model.num_users += 1
        waiting.model.last_used_at = time.monotonic()
        if not waiting.turn.done():
            waiting.turn.set_result(None)

    def admit_all(self, waited_for: ServedModel, model: ServedModel) -> None:
        """Let the requests that wait for a model use it, or the one that has replaced it."""
        for waiting in self._waiting.pop(waited_for, ()):
            self._num_requests.end(waiting.caller.name)
            waiting.model = model
            self.admit(waiting)

    def refuse(self, model: ServedModel, error: SpecdError) -> None:
        """End the requests that wait for a model."""
        for waiting in self._waiting.pop(model, ()):
            self._num_requests.end(waiting.caller.name)
            waiting.turn.set_exception(error)

    def leave(self, waiting: Waiting) -> None:
        """Note the end of a request."""
        model = waiting.model
        if waiting in (waits := self._waiting.get(model, [])):
            waits.remove(waiting)
            self._num_requests.end(waiting.caller.name)
        if waiting.is_admitted:
            model.num_users -= 1
            model.last_used_at = time.monotonic()


def starting(name: str = "") -> UnavailableError:
    """Return the error of a coordinator that waits for the target of a model, or of its only one."""
    of_model = f" of the model {name!r}" if name else ""
    return UnavailableError("STARTING", f"still waiting for the target worker{of_model}", retry_after_seconds=1.0)

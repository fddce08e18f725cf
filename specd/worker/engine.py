"""The thread that owns MLX in a worker: model, caches and every evaluation."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")

# How long a job may go on with steps before others get their turn: a proposal's steps take a millisecond or a few
# each, a prefill's chunk takes tens and more.
TURN_SECONDS = 0.02

# A place in the queue that only wakes the thread up.
_NOTHING = None

# A piece of work for the model, which yields wherever other work may go first and where it can be dropped.
Steps = Generator[None, None, Result]


@dataclass(frozen=True)
class Done(Generic[Result]):
    """The result of a job and where its time went."""

    result: Result
    queue_seconds: float
    compute_seconds: float


@dataclass(eq=False)
class _Job(Generic[Result]):
    steps: Steps[Result]
    submitted_at: float
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Done[Result]]
    compute_seconds: float = 0.0

    def settle(self, outcome: Done[Result] | Exception) -> None:
        """Hand the outcome over to the event loop."""
        self.loop.call_soon_threadsafe(_settle, self.future, outcome)


class Engine:
    """Runs jobs on one thread, in turns.

    MLX streams belong to threads: what one thread builds another cannot evaluate. So everything that touches MLX is a
    job here, and the asyncio side only waits. A turn is one step, and more as long as they are short: the steps of a
    proposal stay together, while a long prefill, which yields after each chunk, makes way after each of them.
    """

    def __init__(self, on_exit: Callable[[], None], *, name: str = "mlx-owner") -> None:
        """Start the thread; `on_exit` is the last thing that it runs."""
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._urgent: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stopped = False
        self._on_exit = on_exit
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, steps: Steps[Result]) -> asyncio.Future[Done[Result]]:
        """Queue a job, from the event loop; cancelling the future drops the job at its next step.

        Once the engine is stopped, the job is cancelled.
        """
        loop = asyncio.get_running_loop()
        job = _Job(steps, time.perf_counter(), loop, loop.create_future())
        if self._stopped:
            job.future.cancel()
        else:
            self._jobs.put(job)
        return job.future

    def run_soon(self, action: Callable[[], None]) -> None:
        """Run something short after the step under way, before any other."""
        self._urgent.put(action)
        self._jobs.put(_NOTHING)

    def stop(self) -> None:
        """Finish the step under way, cancel what waits, and end the thread."""
        self._stopped = True
        self._jobs.put(_NOTHING)
        self._thread.join()

    def _loop(self) -> None:
        while not self._stopped:
            job = self._jobs.get()
            self._run_urgent()
            if job is not None:
                self._take_turn(job)
        self._run_urgent()
        while not self._jobs.empty():
            if (waiting := self._jobs.get()) is not None:
                waiting.loop.call_soon_threadsafe(waiting.future.cancel)
        self._on_exit()

    def _run_urgent(self) -> None:
        while not self._urgent.empty():
            self._urgent.get()()

    def _take_turn(self, job: _Job[Any]) -> None:
        turn_ends_at = time.perf_counter() + TURN_SECONDS
        while self._step(job):
            self._run_urgent()
            if self._stopped or time.perf_counter() >= turn_ends_at:
                self._jobs.put(job)  # behind the others
                return

    def _step(self, job: _Job[Any]) -> bool:
        """Run a step of a job; return whether there is another."""
        if job.future.cancelled():
            job.steps.close()
            return False
        started_at = time.perf_counter()
        try:
            next(job.steps)
        except StopIteration as stop:
            now = time.perf_counter()
            compute_seconds = job.compute_seconds + now - started_at
            job.settle(Done(stop.value, now - job.submitted_at - compute_seconds, compute_seconds))
        except Exception as error:
            job.settle(error)
        else:
            job.compute_seconds += time.perf_counter() - started_at
            return True
        return False


def _settle(future: asyncio.Future[Done[Result]], outcome: Done[Result] | Exception) -> None:
    if future.cancelled():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)

"""The thread that owns MLX in a worker: model, caches and every evaluation."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Result = TypeVar("Result")

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
    future: Future[Done[Result]] = field(default_factory=Future)
    compute_seconds: float = 0.0


class Engine:
    """Runs jobs on one thread, a step of each in turn.

    MLX streams belong to threads: what one thread builds another cannot evaluate. So everything that touches MLX is a
    job here, and the asyncio side only waits. Taking turns means that a long prefill, which yields after each chunk,
    holds up the rounds of other sessions by one chunk at most.
    """

    def __init__(self, on_exit: Callable[[], None], *, name: str = "mlx-owner") -> None:
        """Start the thread; `on_exit` is the last thing that it runs."""
        self._jobs: deque[_Job[object]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._on_exit = on_exit
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    async def run(self, steps: Steps[Result]) -> Done[Result]:
        """Run a job and return its result; cancelling drops the job at its next step."""
        return await asyncio.wrap_future(self.submit(steps))

    def submit(self, steps: Steps[Result]) -> Future[Done[Result]]:
        """Queue a job; any thread may call this. Once the engine is stopped, the job is cancelled."""
        job = _Job(steps, time.perf_counter())
        with self._wake:
            if self._stopping:
                steps.close()
                job.future.cancel()
                return job.future
            self._jobs.append(job)  # type: ignore[arg-type]
            self._wake.notify()
        return job.future

    def stop(self) -> None:
        """Finish the step under way, cancel what waits, and end the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _loop(self) -> None:
        while (job := self._next()) is not None:
            self._step(job)
        for job in self._jobs:
            job.steps.close()
            job.future.cancel()
        self._on_exit()

    def _next(self) -> _Job[object] | None:
        with self._wake:
            self._wake.wait_for(lambda: self._jobs or self._stopping)
            return None if self._stopping else self._jobs.popleft()

    def _step(self, job: _Job[object]) -> None:
        if job.future.cancelled():
            job.steps.close()
            return
        started_at = time.perf_counter()
        try:
            next(job.steps)
        except StopIteration as stop:
            now = time.perf_counter()
            job.compute_seconds += now - started_at
            queue_seconds = now - job.submitted_at - job.compute_seconds
            done = Done(stop.value, queue_seconds, job.compute_seconds)
            if job.future.set_running_or_notify_cancel():  # else it was cancelled meanwhile
                job.future.set_result(done)
        except Exception as error:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(error)  # the caller's to handle
        else:
            job.compute_seconds += time.perf_counter() - started_at
            with self._wake:
                self._jobs.append(job)

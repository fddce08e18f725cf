"""The thread that owns MLX in a worker: model, caches and every evaluation."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import mlx.core as mx
import structlog

from specd.worker.batch import Evaluate, Feed, forward
from specd.worker.schedule import Schedule, StepTime
from specd.worker.streams import STREAMS

log = structlog.get_logger()

Result = TypeVar("Result")

# A piece of work for the model. It yields what is to be fed, and gets the logits; it can be dropped instead. And it
# yields what is to be evaluated, which is done in the same step.
Steps = Generator[Feed | Evaluate, Any, Result]


@dataclass(frozen=True)
class Done(Generic[Result]):
    """The result of a job and where its time went.

    `compute_seconds` is that of the steps which it was part of; `num_sessions` shared the last of them with it, its own
    session included, which took in `step_tokens` of all of them.
    """

    result: Result
    queue_seconds: float
    compute_seconds: float
    num_sessions: int
    step_tokens: int


@dataclass(eq=False)
class _Job(Generic[Result]):
    steps: Steps[Result]
    session: Hashable
    submitted_at: float
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Done[Result]]
    wants: Feed | Evaluate | None = None
    compute_seconds: float = 0.0
    num_sessions: int = 1
    step_tokens: int = 0

    def settle(self, outcome: Done[Result] | Exception) -> None:
        """Hand the outcome over to the event loop."""
        self.loop.call_soon_threadsafe(_settle, self.future, outcome)

    @property
    def feed(self) -> Feed:
        """What it wants to feed, when it waits for its turn to do so."""
        assert self.wants is not None
        assert not isinstance(self.wants, Evaluate)
        return self.wants

    def is_dropped(self) -> bool:
        """Whether nobody waits for it any more; then it has ended."""
        if self.future.cancelled():
            self.steps.close()
            self.wants = None
            return True
        return False


class Engine:
    """Runs jobs on one thread, those that wait at the same time together.

    MLX streams belong to threads: what one thread builds another cannot evaluate. So everything that touches MLX is a
    job here, and the asyncio side only waits. A step is one forward pass over what several jobs want to feed
    (`Schedule` says which); jobs join and leave at every step.
    """

    def __init__(
        self,
        on_exit: Callable[[], None],
        *,
        name: str = "mlx-owner",
        on_failure: Callable[[], None] = lambda: None,
        forward: Callable[[Sequence[Feed]], Sequence[Any]] = forward,
    ) -> None:
        """Start the thread; `on_exit` is the last thing that it runs.

        `on_failure` runs before, if the thread ends because of a mistake in the engine itself, after which nobody would
        get an answer any more.
        """
        self._arriving: SimpleQueue[_Job[Any] | None] = SimpleQueue()  # None only wakes the thread up
        self._urgent: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._schedule: Schedule[_Job[Any]]  # the thread's, like its streams
        self._stopped = False
        self._is_evaluated = True  # whatever the last step computed
        self._on_exit = on_exit
        self._on_failure = on_failure
        self._forward = forward
        self.on_step: Callable[[StepTime], None] = lambda _: None
        self.num_sessions: Callable[[], int] = lambda: 1  # that are open
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, steps: Steps[Result], session: Hashable = None) -> asyncio.Future[Done[Result]]:
        """Queue a job, from the event loop; cancelling the future drops the job at its next step.

        `session` is whose it is, if anybody's: while sessions are known to come again soon, steps may wait for them.
        Once the engine is stopped, the job is cancelled.
        """
        loop = asyncio.get_running_loop()
        job = _Job(steps, session, time.perf_counter(), loop, loop.create_future())
        if self._stopped:
            job.future.cancel()
        else:
            self._arriving.put(job)
        return job.future

    def expect(self, fixed_seconds: float) -> None:
        """Say what a step costs besides its tokens, as far as that is known before any was for several sessions."""
        self.run_soon(lambda: self._schedule.window.expect(fixed_seconds))

    def run_soon(self, action: Callable[[], None]) -> None:
        """Run something short after the step under way, before any other."""
        self._urgent.put(action)
        self._arriving.put(None)

    def stop(self) -> None:
        """Finish the step under way, cancel what waits, and end the thread."""
        self._stopped = True
        self._arriving.put(None)
        self._thread.join()

    def _loop(self) -> None:
        self._schedule = Schedule(shares_cores=len(STREAMS.all) > 1)
        try:
            self._run_jobs()
        except Exception:
            log.exception("the engine failed")
            self._stopped = True
            self._on_failure()
        self._run_urgent()
        for job in (*self._schedule, *self._arrivals(0.0)):
            job.loop.call_soon_threadsafe(job.future.cancel)
        self._on_exit()

    def _run_jobs(self) -> None:
        wait_seconds: float | None = 0.0
        while not self._stopped:
            self._begin_arrivals(wait_seconds)
            if self._stopped:
                break
            now = time.perf_counter()
            jobs, wait_until = self._schedule.next_step(now)
            if jobs:
                self._step(jobs)
                wait_seconds = 0.0
            else:
                wait_seconds = wait_until - now if wait_until is not None else None

    def _begin_arrivals(self, wait_seconds: float | None) -> None:
        """Run what is urgent, and the jobs that have arrived up to their first feed; wait so long if there is none."""
        arrivals = self._arrivals(wait_seconds)
        self._run_urgent()
        for job in arrivals:
            if self._stopped:
                job.loop.call_soon_threadsafe(job.future.cancel)
                continue
            if job.session is not None:
                self._schedule.window.arrived(job.session, job.submitted_at)
            self._advance([job], [None], time.perf_counter())
            self._run_urgent()

    def _arrivals(self, wait_seconds: float | None) -> list[_Job[Any]]:
        arrivals = []
        try:
            if (job := self._arriving.get(block=wait_seconds != 0.0, timeout=wait_seconds)) is not None:
                arrivals.append(job)
            while True:
                if (job := self._arriving.get(block=False)) is not None:
                    arrivals.append(job)
        except Empty:
            return arrivals

    def _run_urgent(self) -> None:
        while not self._urgent.empty():
            self._urgent.get()()

    def _step(self, scheduled: Sequence[_Job[Any]]) -> None:
        """Feed what the jobs want to feed, in one forward pass, and let each go on with its logits."""
        started_at = time.perf_counter()
        jobs = [job for job in scheduled if not job.is_dropped()]
        if not jobs:
            return
        feeds = [job.feed for job in jobs]
        was_evaluated = self._is_evaluated
        num_tokens = sum(feed.num_tokens for feed in feeds)
        for job in jobs:
            job.num_sessions, job.step_tokens = len(jobs), num_tokens
        # Where there are other sessions, the other cores are for what the draft computes for them meanwhile.
        STREAMS.are_free = self.num_sessions() <= len(jobs)
        try:
            outputs = self._forward(feeds)
        except Exception as error:
            for job in jobs:
                self._throw(job, error)
            return
        self._is_evaluated = self._advance(jobs, outputs, started_at) == len(jobs)
        ended_at = time.perf_counter()
        step = StepTime(
            num_sessions=len(feeds),
            num_tokens=num_tokens,
            is_prefill=not feeds[0].wants_logits,
            seconds=ended_at - started_at,
            had_all_cores=STREAMS.are_free,
            is_whole=was_evaluated and self._is_evaluated,
        )
        self._schedule.stepped(step, ended_at)
        self.on_step(step)

    def _advance(self, jobs: Sequence[_Job[Any]], inputs: Sequence[Any], started_at: float) -> int:
        """Let each job go on, with its input, to what it wants to feed next, or to its end.

        What they want evaluated on the way is evaluated together. Their step began at `started_at`. Returns how many
        wanted something evaluated.
        """
        for job, value in zip(jobs, inputs, strict=True):
            self._send(job, value, started_at)
        asking = [job for job in jobs if isinstance(job.wants, Evaluate)]
        if not asking:
            return 0
        try:
            mx.eval([job.wants.arrays for job in asking if isinstance(job.wants, Evaluate)])
        except Exception as error:
            for job in asking:
                self._throw(job, error)
        else:
            self._advance(asking, [None] * len(asking), started_at)
        return len(asking)

    def _send(self, job: _Job[Any], value: Any, started_at: float) -> None:
        if job.is_dropped():
            return
        try:
            job.wants = job.steps.send(value)
        except StopIteration as stop:
            job.wants = None
            now = time.perf_counter()
            compute_seconds = job.compute_seconds + now - started_at
            queue_seconds = now - job.submitted_at - compute_seconds
            job.settle(Done(stop.value, queue_seconds, compute_seconds, job.num_sessions, job.step_tokens))
            if job.session is not None:
                self._schedule.window.answered(job.session, now)
        except Exception as error:
            job.wants = None
            job.settle(error)
        else:
            if not isinstance(job.wants, Evaluate):
                now = time.perf_counter()
                job.compute_seconds += now - started_at
                self._schedule.add(job, now)

    def _throw(self, job: _Job[Any], error: Exception) -> None:
        """End a job whose step failed, with the error where it waits, and where it can clean up."""
        job.wants = None
        try:
            job.steps.throw(error)
        except Exception as raised:
            job.settle(raised)
        else:
            job.steps.close()
            job.settle(error)


def _settle(future: asyncio.Future[Done[Result]], outcome: Done[Result] | Exception) -> None:
    if future.cancelled():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)

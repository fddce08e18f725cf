"""The thread that owns MLX in a worker: model, caches and every evaluation."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol

import mlx.core as mx
import structlog

from specd.worker.cpu.streams import has_several_cores
from specd.worker.engine.forward import compute
from specd.worker.engine.jobs import Done, EarlyResult, Encode, Evaluate, Feed, FirstResult, Result, Steps
from specd.worker.engine.scheduler import Scheduler, StepTime

log = structlog.get_logger()


@dataclass(eq=False)
class _Job(Generic[Result]):
    steps: Steps[Result]
    session: Hashable
    submitted_at: float
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Done[Result]]
    first: asyncio.Future[Done[Any]] | None = None
    wants: Feed | Encode | Evaluate | None = None
    compute_seconds: float = 0.0
    num_sessions: int = 1
    step_tokens: int = 0

    def done(self, result: Result, started_at: float, now: float) -> Done[Result]:
        """Return a result with its times; the step that gave it began at `started_at`."""
        compute_seconds = self.compute_seconds + now - started_at
        queue_seconds = now - self.submitted_at - compute_seconds
        return Done(result, queue_seconds, compute_seconds, self.num_sessions, self.step_tokens)

    def settle(self, outcome: Done[Result] | Exception) -> None:
        """Hand the outcome over to the event loop."""
        self.loop.call_soon_threadsafe(_settle, self.future, outcome)

    @property
    def feed(self) -> Feed | Encode:
        """The tokens that the job waits to feed, or to read."""
        assert self.wants is not None
        assert not isinstance(self.wants, Evaluate)
        return self.wants

    def end_if_cancelled(self) -> bool:
        """End the job if its future was cancelled; return whether it has ended."""
        if not self.future.cancelled():
            return False
        self.steps.close()
        self.wants = None
        return True


class Compute(Protocol):
    """Computes the feeds of several jobs; see `compute`."""

    def __call__(self, wanted: Sequence[Feed | Encode], *, owns_all_cores: bool) -> Sequence[Any]: ...  # noqa: D102


class Engine:
    """Runs jobs on one thread, and waiting jobs together.

    MLX streams belong to threads: one thread cannot evaluate the lazy arrays of another. So all code that touches MLX
    is a job here, and the asyncio side only waits. A job is a generator: it yields tokens to feed, gets logits, and
    yields arrays to evaluate. A step is one forward pass over the feeds of several jobs, which the `Scheduler` chooses;
    jobs join, leave and are dropped at every step, and freed caches go first.
    """

    def __init__(
        self,
        on_exit: Callable[[], None],
        *,
        name: str = "mlx-owner",
        on_failure: Callable[[], None] = lambda: None,
        compute: Compute = compute,
    ) -> None:
        """Start the thread; `on_exit` is the last thing that it runs.

        `on_failure` runs before it, if an error in the engine itself ends the thread, after which no job would get an
        answer.
        """
        self._arriving: SimpleQueue[_Job[Any] | None] = SimpleQueue()  # None only wakes the thread
        self._urgent: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._schedule: Scheduler[_Job[Any]] = Scheduler(shares_cores=has_several_cores())  # the thread's from now on
        self._stopped = False
        self._is_evaluated = True  # whether the last step evaluated all that it described
        self._busy_since: float | None = None  # the start of the running step, or of the work between two steps
        self._on_exit = on_exit
        self._on_failure = on_failure
        self._compute = compute
        self.on_step: Callable[[StepTime], None] = lambda _: None
        self.drafts = False  # whether it computes the draft, too, so that no other process does
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    @property
    def num_active_sessions(self) -> int:
        """The number of sessions with work in the last few steps. For jobs, which run on the thread."""
        return self._schedule.window.num_active

    @property
    def busy_seconds(self) -> float:
        """Seconds since the running step began, 0 without one. For other threads."""
        since = self._busy_since
        return time.perf_counter() - since if since is not None else 0.0

    def submit(
        self,
        steps: Steps[Result],
        session: Hashable = None,
        *,
        first: asyncio.Future[Done[Any]] | None = None,
    ) -> asyncio.Future[Done[Result]]:
        """Queue a job, from the event loop; cancelling the future drops the job at its next step.

        `session` is the job's session, if it has one: steps may wait for sessions that usually return soon. Once the
        engine is stopped, the job is cancelled. `first` gets the job's `FirstResult`, if it has one.
        """
        loop = asyncio.get_running_loop()
        job = _Job(steps, session, time.perf_counter(), loop, loop.create_future(), first)
        if self._stopped:
            job.future.cancel()
        else:
            self._arriving.put(job)
        return job.future

    def expect(self, fixed_seconds: float) -> None:
        """Set the fixed cost of a step, which holds until the steps themselves have shown it."""
        self.run_soon(lambda: self._schedule.window.expect(fixed_seconds))

    def run_soon(self, action: Callable[[], None]) -> None:
        """Run a short action after the running step, before any other job."""
        self._urgent.put(action)
        self._arriving.put(None)

    def stop(self) -> None:
        """Finish the running step, cancel the waiting jobs, and end the thread."""
        self._stopped = True
        self._arriving.put(None)
        self._thread.join()

    def _loop(self) -> None:
        try:
            self._run_jobs()
            self._run_urgent()
        except Exception:
            log.exception("the engine failed")
            self._stopped = True
            self._on_failure()
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
        """Run urgent actions, and new jobs up to their first feed; wait at most `wait_seconds` for a job."""
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
        self._busy_since = None
        try:
            if (job := self._arriving.get(block=wait_seconds != 0.0, timeout=wait_seconds)) is not None:
                arrivals.append(job)
            while True:
                if (job := self._arriving.get(block=False)) is not None:
                    arrivals.append(job)
        except Empty:
            return arrivals
        finally:
            self._busy_since = time.perf_counter()

    def _run_urgent(self) -> None:
        while not self._urgent.empty():
            self._urgent.get()()

    def _step(self, scheduled: Sequence[_Job[Any]]) -> None:
        """Feed the tokens of the jobs in one forward pass, and resume each job with its logits."""
        started_at = time.perf_counter()
        jobs = [job for job in scheduled if not job.end_if_cancelled()]
        if not jobs:
            return
        feeds = [job.feed for job in jobs]
        was_evaluated = self._is_evaluated
        num_tokens = sum(feed.num_tokens for feed in feeds)
        for job in jobs:
            job.num_sessions, job.step_tokens = len(jobs), num_tokens
        self._schedule.window.step_begins([job.session for job in jobs if job.session is not None])
        # Where other sessions are active, a draft worker computes for them now, and needs the other cores.
        owns_all_cores = self.drafts or self.num_active_sessions <= len(jobs)
        try:
            outputs = self._compute(feeds, owns_all_cores=owns_all_cores)
        except Exception as error:
            for job in jobs:
                self._throw(job, error, started_at)
            return
        self._is_evaluated = self._advance(jobs, outputs, started_at) == len(jobs)
        ended_at = time.perf_counter()
        step = StepTime(
            num_sessions=len(feeds),
            num_tokens=num_tokens,
            is_prefill=not feeds[0].wants_logits,
            reads_source=isinstance(feeds[0], Encode),
            network=feeds[0].network,
            seconds=ended_at - started_at,
            had_all_cores=owns_all_cores,
            is_whole=was_evaluated and self._is_evaluated,
        )
        self._schedule.stepped(step, ended_at)
        self.on_step(step)

    def _advance(self, jobs: Sequence[_Job[Any]], inputs: Sequence[Any], started_at: float) -> int:
        """Resume each job with its input, up to its next feed or its end.

        The arrays that the jobs yield for evaluation are evaluated together. The step began at `started_at`. Returns
        the number of jobs that yielded arrays.
        """
        for job, value in zip(jobs, inputs, strict=True):
            self._send(job, value, started_at)
        num_evaluated = len(asking := _asking_for_evaluation(jobs))
        while asking:
            try:
                mx.eval([arrays for _, arrays in asking])
            except Exception as error:
                for job, _ in asking:
                    self._throw(job, error, started_at)
                break
            for job, _ in asking:
                self._send(job, None, started_at)
            asking = _asking_for_evaluation([job for job, _ in asking])
        return num_evaluated

    def _send(self, job: _Job[Any], value: Any, started_at: float) -> None:
        if job.end_if_cancelled():
            return
        try:
            wants = job.steps.send(value)
            if isinstance(wants, FirstResult):
                started_at = self._begin_second(job, wants.result, started_at)
                wants = job.steps.send(None)
            if isinstance(wants, EarlyResult):
                self._end(job, wants.result, started_at)
                self._continue(job)
                return
            assert not isinstance(wants, FirstResult), "a job has one first result"
            job.wants = wants
        except StopIteration as stop:
            self._end(job, stop.value, started_at)
        except Exception as error:
            job.wants = None
            job.settle(error)
        else:
            if not isinstance(job.wants, Evaluate):
                now = time.perf_counter()
                job.compute_seconds += now - started_at
                self._schedule.add(job, now)

    def _continue(self, job: _Job[Any]) -> None:
        """Feed the tokens of a job that has answered, while the answer travels."""
        try:
            wants = job.steps.send(None)
            while True:
                try:
                    if isinstance(wants, Evaluate):  # of a head, which reads the target's states
                        mx.eval(wants.arrays)
                        logits = None
                    else:
                        (logits,) = self._compute([wants], owns_all_cores=True)  # type: ignore[list-item]
                except Exception as error:
                    wants = job.steps.throw(error)
                else:
                    wants = job.steps.send(logits)
        except StopIteration:
            return
        except Exception:  # the job frees what it holds, and the session's next request says what is missing
            log.exception("steps ahead failed")

    def _begin_second(self, job: _Job[Any], result: Any, started_at: float) -> float:
        """Hand over a job's first result; return the time from which the second one counts."""
        now = time.perf_counter()
        if job.first is not None:
            job.loop.call_soon_threadsafe(_settle, job.first, job.done(result, started_at, now))
        job.submitted_at, job.compute_seconds = now, 0.0
        return now

    def _end(self, job: _Job[Any], result: Any, started_at: float) -> None:
        job.wants = None
        now = time.perf_counter()
        job.settle(job.done(result, started_at, now))
        if job.session is not None:
            self._schedule.window.answered(job.session, now)

    def _throw(self, job: _Job[Any], error: Exception, started_at: float) -> None:
        """Raise the error of a failed step inside a job, where it can clean up, and end the job with it."""
        job.wants = None
        try:
            job.steps.throw(error)
        except StopIteration as stop:  # the job has a result in spite of the error
            self._end(job, stop.value, started_at)
        except Exception as raised:
            job.settle(raised)
        else:
            job.steps.close()
            job.settle(error)


def _asking_for_evaluation(jobs: Sequence[_Job[Any]]) -> list[tuple[_Job[Any], Sequence[mx.array]]]:
    return [(job, job.wants.arrays) for job in jobs if isinstance(job.wants, Evaluate)]


def _settle(future: asyncio.Future[Done[Result]], outcome: Done[Result] | Exception) -> None:
    if future.cancelled():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)

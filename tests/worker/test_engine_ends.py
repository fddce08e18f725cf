"""The owner thread: how jobs and the thread itself end, by cancellation, by errors and by a stop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import mlx.core as mx
import pytest

from specd.worker.engine import engine as engine_module
from specd.worker.engine import scheduler as schedule
from specd.worker.engine.engine import Engine
from specd.worker.engine.jobs import Evaluate, Steps
from specd.worker.main import end_if_stuck
from tests.worker.fake_model import FakeModel, feed, held_up, hold_until, steps


async def test_a_cancelled_job_stops_at_its_next_step(engine: Engine, fake_model: FakeModel) -> None:
    async with held_up(engine):
        job = engine.submit(steps("dropped", 1000))
        job.cancel()
    await engine.submit(steps("next", 1))
    assert fake_model.passes == [["next"]]


async def test_a_job_that_is_cancelled_in_a_batch_leaves_the_others_alone(
    engine: Engine, fake_model: FakeModel
) -> None:
    jobs: list[asyncio.Future[Any]] = []
    loop = asyncio.get_running_loop()

    def cancels_the_next() -> Steps[str]:
        yield feed("first")
        done = threading.Event()
        loop.call_soon_threadsafe(lambda: (jobs[1].cancel(), done.set()))
        done.wait()
        yield feed("first")
        return "first"

    async with held_up(engine):
        jobs += [engine.submit(cancels_the_next()), engine.submit(steps("second", 9)), engine.submit(steps("third", 2))]
    assert [(await jobs[0]).result, (await jobs[2]).result] == ["first", "third"]
    assert fake_model.passes == [["first", "second", "third"], ["first", "third"]]


async def test_an_error_reaches_the_caller_and_only_the_caller(engine: Engine) -> None:
    def fail() -> Steps[None]:
        yield feed("fails")
        raise ValueError("boom")

    async with held_up(engine):
        failing, fine = engine.submit(fail()), engine.submit(steps("fine", 2))
    with pytest.raises(ValueError, match="boom"):
        await failing
    assert (await fine).result == "fine"


async def test_an_error_in_an_evaluation_reaches_all_who_wait_for_it(engine: Engine) -> None:
    foreign = mx.array(20.0) + 1  # on another thread's stream

    def asks(cleaned: list[str]) -> Steps[None]:
        yield feed("asks")
        try:
            yield Evaluate([foreign])
        finally:
            cleaned.append("up")

    cleaned: list[str] = []
    async with held_up(engine):
        asking = [engine.submit(asks(cleaned)) for _ in range(2)]
    for job in asking:
        with pytest.raises(RuntimeError, match="Stream"):
            await job
    assert cleaned == ["up", "up"]
    assert (await engine.submit(steps("next", 1))).result == "next"


async def test_a_pass_that_fails_ends_its_jobs_where_they_can_clean_up(engine: Engine, fake_model: FakeModel) -> None:
    cleaned: list[str] = []

    def cleans_up(name: str) -> Steps[None]:
        try:
            yield feed(name)
        except MemoryError:
            cleaned.append(name)
            raise

    fake_model.error = MemoryError("no room")
    async with held_up(engine):
        jobs = [engine.submit(cleans_up(name)) for name in "ab"]
    for job in jobs:
        with pytest.raises(MemoryError, match="no room"):
            await job
    assert cleaned == ["a", "b"]
    fake_model.error = None
    assert (await engine.submit(steps("next", 1))).result == "next"


async def test_a_job_may_answer_in_spite_of_an_error(engine: Engine, fake_model: FakeModel) -> None:
    """Its caller waited for ever: a future takes no StopIteration."""

    def forgiving() -> Steps[str]:
        try:
            yield feed("a")
        except RuntimeError:
            return "all the same"
        return "never"

    fake_model.error = RuntimeError("out of memory")
    done = await asyncio.wait_for(engine.submit(forgiving()), 10)
    assert done.result == "all the same"


async def test_stop_cancels_what_waits_and_runs_the_last_call() -> None:
    called = threading.Event()
    engine = Engine(called.set)
    start = threading.Event()
    holding = engine.submit(hold_until(start))
    waiting = engine.submit(steps("never", 1))
    stopping = asyncio.get_running_loop().run_in_executor(None, engine.stop)
    while not engine._stopped:  # noqa: ASYNC110 - another thread sets it
        await asyncio.sleep(0.001)
    start.set()
    await stopping
    assert called.is_set()
    await asyncio.gather(holding, waiting, return_exceptions=True)
    assert waiting.cancelled()
    assert engine.submit(steps("late", 1)).cancelled()


async def test_a_mistake_in_the_engine_is_not_silent(fake_model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()
    engine = Engine(lambda: None, compute=fake_model.forward, on_failure=failed.set)

    def break_down(*_: Any) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(schedule.Scheduler, "next_step", break_down)
    with pytest.raises(asyncio.CancelledError):
        await engine.submit(steps("a", 1))
    assert failed.wait(10)
    engine.stop()


async def test_an_urgent_action_that_fails_at_the_end_is_not_silent(fake_model: FakeModel) -> None:
    failed, ended = threading.Event(), threading.Event()
    engine = Engine(ended.set, compute=fake_model.forward, on_failure=failed.set)
    started, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        go_on.wait(10)

    def break_down() -> None:
        raise RuntimeError("a mistake")

    engine.run_soon(wait)
    assert await asyncio.to_thread(started.wait, 10)
    engine.run_soon(break_down)
    stopping = asyncio.get_running_loop().run_in_executor(None, engine.stop)
    go_on.set()
    await stopping
    assert failed.is_set()
    assert ended.is_set()


def test_an_engine_that_cannot_begin_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error on its thread, outside of all handlers, would leave all jobs waiting."""

    def break_down(*_: Any, **__: Any) -> None:
        raise RuntimeError("no cores")

    monkeypatch.setattr(engine_module, "has_several_cores", break_down)
    with pytest.raises(RuntimeError, match="no cores"):
        Engine(lambda: None)


async def test_a_step_that_does_not_end_ends_the_process(engine: Engine) -> None:
    ended = asyncio.Event()
    watching = asyncio.ensure_future(end_if_stuck(engine, 0.3, ended.set))
    for _ in range(5):
        await engine.submit(steps("fine", 2))
        await asyncio.sleep(0.1)  # idle for longer than that in all
    assert not ended.is_set()
    async with held_up(engine):
        async with asyncio.timeout(20):
            await ended.wait()
        assert engine.busy_seconds >= 0.3
    await watching

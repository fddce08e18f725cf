"""The owner thread: turns, cancellation, errors, stop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from specd.worker import engine as engine_module
from specd.worker.engine import Engine, Steps


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    running = Engine(lambda: None)
    yield running
    running.stop()


def steps(name: str, count: int, journal: list[str]) -> Steps[str]:
    for _ in range(count):
        journal.append(name)
        yield
    return name


def hold_until(event: threading.Event) -> Steps[None]:
    event.wait()
    return
    yield


async def test_jobs_take_turns(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "TURN_SECONDS", 0.0)
    journal: list[str] = []
    start = threading.Event()
    holding = engine.submit(hold_until(start))
    jobs = [engine.submit(steps("long", 4, journal)), engine.submit(steps("short", 2, journal))]
    start.set()
    await holding
    assert [(await job).result for job in jobs] == ["long", "short"]
    assert journal == ["long", "short", "long", "short", "long", "long"]


async def test_short_steps_of_a_job_stay_together(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "TURN_SECONDS", 60.0)
    journal: list[str] = []
    start = threading.Event()
    holding = engine.submit(hold_until(start))
    jobs = [engine.submit(steps("first", 3, journal)), engine.submit(steps("second", 2, journal))]
    start.set()
    await holding
    await asyncio.wait(jobs)
    assert journal == ["first"] * 3 + ["second"] * 2


async def test_what_is_urgent_runs_after_the_step_under_way(engine: Engine) -> None:
    journal: list[str] = []
    start = threading.Event()
    holding = engine.submit(hold_until(start))
    waiting = engine.submit(steps("waits", 2, journal))
    engine.run_soon(lambda: journal.append("urgent"))
    start.set()
    await asyncio.wait([holding, waiting])
    assert journal == ["urgent", "waits", "waits"]


async def test_every_step_runs_on_the_same_thread(engine: Engine) -> None:
    def which_thread() -> Steps[set[int]]:
        threads = {threading.get_ident()}
        yield
        threads.add(threading.get_ident())
        return threads

    first, second = (await engine.submit(which_thread())).result, (await engine.submit(which_thread())).result
    assert first == second
    assert len(first) == 1
    assert threading.get_ident() not in first


async def test_a_cancelled_job_stops_at_its_next_step(engine: Engine) -> None:
    journal: list[str] = []
    start = threading.Event()
    holding = engine.submit(hold_until(start))
    job = engine.submit(steps("dropped", 1000, journal))
    job.cancel()
    start.set()
    await holding
    await engine.submit(steps("next", 1, journal))
    assert journal == ["next"]


async def test_an_error_reaches_the_caller_and_only_the_caller(engine: Engine) -> None:
    def fail() -> Steps[None]:
        yield
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        await engine.submit(fail())
    assert (await engine.submit(steps("fine", 1, []))).result == "fine"


async def test_time_is_accounted_for(engine: Engine) -> None:
    start = threading.Event()
    holding = engine.submit(hold_until(start))
    waiting = engine.submit(steps("waits", 1, []))
    await asyncio.sleep(0.05)
    start.set()
    held, waited = await holding, await waiting
    assert held.compute_seconds >= 0.05 > held.queue_seconds
    assert waited.queue_seconds >= 0.05 > waited.compute_seconds


async def test_stop_cancels_what_waits_and_runs_the_last_call() -> None:
    called = threading.Event()
    engine = Engine(called.set)
    start = threading.Event()
    holding = engine.submit(hold_until(start))
    waiting = engine.submit(steps("never", 1, []))
    stopping = asyncio.get_running_loop().run_in_executor(None, engine.stop)
    while not engine._stopped:  # noqa: ASYNC110 - another thread sets it
        await asyncio.sleep(0.001)
    start.set()
    await stopping
    assert called.is_set()
    await asyncio.wait([holding, waiting])
    assert waiting.cancelled()
    assert engine.submit(steps("late", 1, [])).cancelled()

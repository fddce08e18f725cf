"""The owner thread: batches, turns, cancellation, errors, stop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import pytest

from specd.worker import schedule
from specd.worker.batch import Evaluate, Feed
from specd.worker.engine import Engine, Steps
from specd.worker.schedule import StepTime
from specd.worker.streams import STREAMS


@dataclass(frozen=True)
class FakeFeed:
    """Something to feed, of so many tokens; its logits are its name."""

    name: str
    num_tokens: int = 1
    wants_logits: bool = True
    can_wait: bool = False


class FakeModel:
    """Keeps a record of its forward passes, each the names of what was fed."""

    def __init__(self) -> None:
        self.passes: list[list[str]] = []
        self.error: Exception | None = None

    def forward(self, feeds: Sequence[Feed]) -> list[str]:
        names = [cast(FakeFeed, feed).name for feed in feeds]
        self.passes.append(names)
        if self.error is not None:
            raise self.error
        return names


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
async def engine(model: FakeModel) -> AsyncIterator[Engine]:
    running = Engine(lambda: None, forward=model.forward)
    yield running
    running.stop()


def feed(name: str, **fields: Any) -> Feed:
    return cast(Feed, FakeFeed(name, **fields))


def steps(name: str, count: int, **fields: Any) -> Steps[str]:
    for _ in range(count):
        assert (yield feed(name, **fields)) == name  # and not somebody else's logits
    return name


def hold_until(event: threading.Event) -> Steps[None]:
    event.wait()
    return
    yield


async def run_together(engine: Engine, *jobs: Steps[Any]) -> list[Any]:
    """Submit jobs that arrive while the engine is busy, and return what they come to."""
    start = threading.Event()
    holding = engine.submit(hold_until(start))
    submitted = [engine.submit(job) for job in jobs]
    start.set()
    await holding
    return [done.result for done in await asyncio.gather(*submitted)]


async def test_jobs_that_wait_are_fed_together_and_leave_when_they_are_done(engine: Engine, model: FakeModel) -> None:
    assert await run_together(engine, steps("long", 3), steps("short", 1)) == ["long", "short"]
    assert model.passes == [["long", "short"], ["long"], ["long"]]


async def test_a_job_knows_how_much_its_last_step_took_in(engine: Engine) -> None:
    start = threading.Event()
    holding = engine.submit(hold_until(start))
    short, long = engine.submit(steps("short", 1, num_tokens=2)), engine.submit(steps("long", 2, num_tokens=3))
    start.set()
    await holding
    done = await asyncio.gather(short, long)
    assert [(each.num_sessions, each.step_tokens) for each in done] == [(2, 5), (1, 3)]


async def test_a_job_joins_at_the_next_step(engine: Engine, model: FakeModel) -> None:
    joined: list[asyncio.Future[Any]] = []
    loop = asyncio.get_running_loop()

    def first() -> Steps[None]:
        yield feed("first")
        arrived = threading.Event()
        loop.call_soon_threadsafe(lambda: (joined.append(engine.submit(steps("second", 1))), arrived.set()))
        arrived.wait()
        yield feed("first")

    await engine.submit(first())
    await joined[0]
    assert model.passes == [["first"], ["first", "second"]]


async def test_a_step_has_room_for_so_many_tokens(
    engine: Engine, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "MAX_STEP_TOKENS", 8)
    sizes = {"a": 5, "b": 3, "c": 1, "d": 20}
    await run_together(engine, *(steps(name, 1, num_tokens=size) for name, size in sizes.items()))
    assert model.passes == [["a", "b"], ["c"], ["d"]]


async def test_who_waits_longest_comes_first(engine: Engine, model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "MAX_STEP_TOKENS", 2)
    await run_together(engine, *(steps(name, 2) for name in "abc"))
    assert model.passes == [["a", "b"], ["c", "a"], ["b", "c"]]


async def test_prefills_take_turns_with_each_other_and_with_the_rest(
    engine: Engine, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "ROUNDS_TO_CHUNKS", 0.0)
    prefills = [steps(name, 2, wants_logits=False) for name in ("prefill 1", "prefill 2")]
    await run_together(engine, *prefills, steps("decode", 5))
    alone = [names for names in model.passes if len(names) == 1]
    assert len(alone) == len(model.passes)
    chunks = [names[0] for names in model.passes if names[0] != "decode"]
    assert chunks == ["prefill 1", "prefill 2", "prefill 1", "prefill 2"]


async def test_a_prefill_does_not_hold_up_the_rest_by_more_than_a_chunk(
    engine: Engine, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "ROUNDS_TO_CHUNKS", 1e6)
    await engine.submit(steps("prefill", 1, wants_logits=False))  # a chunk has just been
    await run_together(engine, steps("prefill", 2, wants_logits=False), steps("decode", 3))
    assert model.passes == [["prefill"], ["decode"], ["decode"], ["decode"], ["prefill"], ["prefill"]]


async def test_what_is_urgent_runs_after_the_step_under_way(engine: Engine, model: FakeModel) -> None:
    start = threading.Event()
    holding = engine.submit(hold_until(start))
    waiting = engine.submit(steps("waits", 2))
    engine.run_soon(lambda: model.passes.append(["urgent"]))
    start.set()
    await asyncio.wait([holding, waiting])
    assert model.passes == [["urgent"], ["waits"], ["waits"]]


async def test_every_step_runs_on_the_same_thread(engine: Engine) -> None:
    def which_thread() -> Steps[set[int]]:
        threads = {threading.get_ident()}
        yield feed("")
        threads.add(threading.get_ident())
        return threads

    first, second = (await engine.submit(which_thread())).result, (await engine.submit(which_thread())).result
    assert first == second
    assert len(first) == 1
    assert threading.get_ident() not in first


async def test_a_cancelled_job_stops_at_its_next_step(engine: Engine, model: FakeModel) -> None:
    start = threading.Event()
    holding = engine.submit(hold_until(start))
    job = engine.submit(steps("dropped", 1000))
    job.cancel()
    start.set()
    await holding
    await engine.submit(steps("next", 1))
    assert model.passes == [["next"]]


async def test_a_job_that_is_cancelled_in_a_batch_leaves_the_others_alone(engine: Engine, model: FakeModel) -> None:
    jobs: list[asyncio.Future[Any]] = []
    loop = asyncio.get_running_loop()

    def cancels_the_next() -> Steps[str]:
        yield feed("first")
        done = threading.Event()
        loop.call_soon_threadsafe(lambda: (jobs[1].cancel(), done.set()))
        done.wait()
        yield feed("first")
        return "first"

    start = threading.Event()
    holding = engine.submit(hold_until(start))
    jobs += [engine.submit(cancels_the_next()), engine.submit(steps("second", 9)), engine.submit(steps("third", 2))]
    start.set()
    await holding
    assert [(await jobs[0]).result, (await jobs[2]).result] == ["first", "third"]
    assert model.passes == [["first", "second", "third"], ["first", "third"]]


async def test_what_jobs_want_evaluated_is_evaluated_in_their_step(engine: Engine, model: FakeModel) -> None:
    def asks(name: str) -> Steps[float]:
        yield feed(name)
        array = mx.array(20.0) + 1
        yield Evaluate([array])
        model.passes.append([f"{name} knows {array.item()}"])
        yield feed(name)
        return array.item()

    assert await run_together(engine, asks("a"), asks("b")) == [21.0, 21.0]
    assert model.passes == [["a", "b"], ["a knows 21.0"], ["b knows 21.0"], ["a", "b"]]


async def test_an_error_in_an_evaluation_reaches_all_who_wait_for_it(engine: Engine) -> None:
    foreign = mx.array(20.0) + 1  # on another thread's stream

    def asks(cleaned: list[str]) -> Steps[None]:
        yield feed("asks")
        try:
            yield Evaluate([foreign])
        finally:
            cleaned.append("up")

    cleaned: list[str] = []
    start = threading.Event()
    holding = engine.submit(hold_until(start))
    asking = [engine.submit(asks(cleaned)) for _ in range(2)]
    start.set()
    await holding
    for job in asking:
        with pytest.raises(RuntimeError, match="Stream"):
            await job
    assert cleaned == ["up", "up"]
    assert (await engine.submit(steps("next", 1))).result == "next"


async def test_an_error_reaches_the_caller_and_only_the_caller(engine: Engine) -> None:
    def fail() -> Steps[None]:
        yield feed("fails")
        raise ValueError("boom")

    start = threading.Event()
    holding = engine.submit(hold_until(start))
    failing, fine = engine.submit(fail()), engine.submit(steps("fine", 2))
    start.set()
    await holding
    with pytest.raises(ValueError, match="boom"):
        await failing
    assert (await fine).result == "fine"


async def test_a_pass_that_fails_ends_its_jobs_where_they_can_clean_up(engine: Engine, model: FakeModel) -> None:
    cleaned: list[str] = []

    def cleans_up(name: str) -> Steps[None]:
        try:
            yield feed(name)
        except MemoryError:
            cleaned.append(name)
            raise

    model.error = MemoryError("no room")
    start = threading.Event()
    holding = engine.submit(hold_until(start))
    jobs = [engine.submit(cleans_up(name)) for name in "ab"]
    start.set()
    await holding
    for job in jobs:
        with pytest.raises(MemoryError, match="no room"):
            await job
    assert cleaned == ["a", "b"]
    model.error = None
    assert (await engine.submit(steps("next", 1))).result == "next"


async def test_time_is_accounted_for(engine: Engine) -> None:
    start = threading.Event()
    holding = engine.submit(hold_until(start))
    waiting = engine.submit(steps("waits", 1))
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
    waiting = engine.submit(steps("never", 1))
    stopping = asyncio.get_running_loop().run_in_executor(None, engine.stop)
    while not engine._stopped:  # noqa: ASYNC110 - another thread sets it
        await asyncio.sleep(0.001)
    start.set()
    await stopping
    assert called.is_set()
    await asyncio.wait([holding, waiting])
    assert waiting.cancelled()
    assert engine.submit(steps("late", 1)).cancelled()


async def test_a_mistake_in_the_engine_is_not_silent(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()
    engine = Engine(lambda: None, forward=model.forward, on_failure=failed.set)

    def break_down(*_: Any) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(schedule.Schedule, "next_step", break_down)
    with pytest.raises(asyncio.CancelledError):
        await engine.submit(steps("a", 1))
    assert failed.wait(10)
    engine.stop()


# The cores.


async def test_a_step_has_all_cores_while_there_is_no_session_that_it_is_not_for() -> None:
    free: list[bool] = []
    steps_taken: list[StepTime] = []

    def forward(feeds: Sequence[Feed]) -> list[str]:
        free.append(STREAMS.are_free)
        return [cast(FakeFeed, fed).name for fed in feeds]

    engine = Engine(lambda: None, forward=forward)
    engine.on_step = steps_taken.append
    num_sessions = 1
    engine.num_sessions = lambda: num_sessions
    try:
        await engine.submit(steps("a", 2))
        num_sessions = 2
        await engine.submit(steps("a", 1))
        await asyncio.gather(engine.submit(steps("a", 1)), engine.submit(steps("b", 1)))
        num_sessions = 3
        await asyncio.gather(engine.submit(steps("a", 1)), engine.submit(steps("b", 1)))
        num_sessions = 1
        await engine.submit(steps("a", 1))
    finally:
        engine.stop()
    assert free == [True, True, False, True, False, True]
    assert [step.had_all_cores for step in steps_taken] == free

"""The owner thread: which jobs share a step, whose turn it is, and what each is told of its steps."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import pytest

from specd.step_costs import StepCosts
from specd.worker.engine import batch_window
from specd.worker.engine import scheduler as schedule
from specd.worker.engine.engine import Engine
from specd.worker.engine.jobs import EarlyResult, Encode, Evaluate, Feed, FirstResult, Steps
from specd.worker.engine.scheduler import Scheduler, StepTime
from specd.worker.session.stream import Worker
from target_worker.service import _pad
from tests.worker.fake_model import FakeFeed, FakeModel, feed, held_up, hold_until, run_together, steps
from tests.worker.models import tiny_model


async def test_jobs_that_wait_are_fed_together_and_leave_when_they_are_done(
    engine: Engine, fake_model: FakeModel
) -> None:
    assert await run_together(engine, steps("long", 3), steps("short", 1)) == ["long", "short"]
    assert fake_model.passes == [["long", "short"], ["long"], ["long"]]


async def test_a_job_knows_how_much_its_last_step_took_in(engine: Engine) -> None:
    async with held_up(engine):
        short, long = engine.submit(steps("short", 1, num_tokens=2)), engine.submit(steps("long", 2, num_tokens=3))
    done = await asyncio.gather(short, long)
    assert [(each.num_sessions, each.step_tokens) for each in done] == [(2, 5), (1, 3)]


async def test_a_job_joins_at_the_next_step(engine: Engine, fake_model: FakeModel) -> None:
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
    assert fake_model.passes == [["first"], ["first", "second"]]


async def test_an_early_result_comes_before_what_follows_it(engine: Engine, fake_model: FakeModel) -> None:
    has_come = threading.Event()

    def job() -> Steps[str]:
        yield feed("first")
        yield EarlyResult("result")
        assert has_come.wait(timeout=30)
        assert (yield feed("ahead")) == "ahead"
        return "not used"

    assert (await engine.submit(job())).result == "result"
    has_come.set()
    assert (await engine.submit(steps("next", 1))).result == "next"
    assert fake_model.passes == [["first"], ["ahead"], ["next"]]


async def test_a_first_result_comes_before_the_second_which_others_join(engine: Engine, fake_model: FakeModel) -> None:
    def job(name: str) -> Steps[str]:
        yield feed(name)
        yield FirstResult(f"first {name}")
        yield feed(f"more {name}")
        return f"second {name}"

    loop = asyncio.get_running_loop()
    firsts = [loop.create_future() for _ in "ab"]
    seconds = [engine.submit(job(name), first=first) for name, first in zip("ab", firsts, strict=True)]
    assert [(await first).result for first in firsts] == ["first a", "first b"]
    assert [(await second).result for second in seconds] == ["second a", "second b"]
    assert sorted(name for names in fake_model.passes for name in names) == ["a", "b", "more a", "more b"]


async def test_what_follows_a_first_result_can_be_dropped(engine: Engine, fake_model: FakeModel) -> None:
    was_closed, may_go_on = threading.Event(), threading.Event()

    def job() -> Steps[str]:
        try:
            yield feed("first")
            yield FirstResult("result")
            yield feed("more")
            assert may_go_on.wait(timeout=30)
            yield feed("not computed")
            return "second"
        finally:
            was_closed.set()

    first = asyncio.get_running_loop().create_future()
    second = engine.submit(job(), first=first)
    assert (await first).result == "result"
    second.cancel()
    may_go_on.set()
    assert await asyncio.to_thread(was_closed.wait, 30)
    assert ["not computed"] not in fake_model.passes


async def test_an_error_after_an_early_result_ends_only_what_follows_it(engine: Engine, fake_model: FakeModel) -> None:
    was_closed = threading.Event()

    def job() -> Steps[str]:
        try:
            yield feed("first")
            yield EarlyResult("result")
            raise RuntimeError("out of memory")
        finally:
            was_closed.set()

    assert (await engine.submit(job())).result == "result"
    assert (await engine.submit(steps("next", 1))).result == "next"
    assert was_closed.is_set()


async def test_a_step_has_room_for_so_many_tokens(
    engine: Engine, fake_model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "MAX_STEP_TOKENS", 8)
    sizes = {"a": 5, "b": 3, "c": 1, "d": 20}
    await run_together(engine, *(steps(name, 1, num_tokens=size) for name, size in sizes.items()))
    assert fake_model.passes == [["a", "b"], ["c"], ["d"]]


async def test_who_waits_longest_comes_first(
    engine: Engine, fake_model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "MAX_STEP_TOKENS", 2)
    await run_together(engine, *(steps(name, 2) for name in "abc"))
    assert fake_model.passes == [["a", "b"], ["c", "a"], ["b", "c"]]


async def test_prefills_take_turns_with_each_other_and_with_the_rest(
    engine: Engine, fake_model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "ROUNDS_TO_CHUNKS", 0.0)
    prefills = [steps(name, 2, wants_logits=False) for name in ("prefill 1", "prefill 2")]
    await run_together(engine, *prefills, steps("decode", 5))
    alone = [names for names in fake_model.passes if len(names) == 1]
    assert len(alone) == len(fake_model.passes)
    chunks = [names[0] for names in fake_model.passes if names[0] != "decode"]
    assert chunks == ["prefill 1", "prefill 2", "prefill 1", "prefill 2"]


async def test_a_prefill_does_not_hold_up_the_rest_by_more_than_a_chunk(
    engine: Engine, fake_model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "ROUNDS_TO_CHUNKS", 1e6)
    await engine.submit(steps("prefill", 1, wants_logits=False))  # a chunk has just been
    await run_together(engine, steps("prefill", 2, wants_logits=False), steps("decode", 3))
    assert fake_model.passes == [["prefill"], ["decode"], ["decode"], ["decode"], ["prefill"], ["prefill"]]


async def test_what_is_urgent_runs_after_the_step_under_way(engine: Engine, fake_model: FakeModel) -> None:
    async with held_up(engine):
        waiting = engine.submit(steps("waits", 2))
        engine.run_soon(lambda: fake_model.passes.append(["urgent"]))
    await waiting
    assert fake_model.passes == [["urgent"], ["waits"], ["waits"]]


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


async def test_what_jobs_want_evaluated_is_evaluated_in_their_step(engine: Engine, fake_model: FakeModel) -> None:
    def asks(name: str) -> Steps[float]:
        yield feed(name)
        array = mx.array(20.0) + 1
        yield Evaluate([array])
        fake_model.passes.append([f"{name} knows {array.item()}"])
        yield feed(name)
        return array.item()  # type: ignore[return-value]

    assert await run_together(engine, asks("a"), asks("b")) == [21.0, 21.0]
    assert fake_model.passes == [["a", "b"], ["a knows 21.0"], ["b knows 21.0"], ["a", "b"]]


async def test_time_is_accounted_for(engine: Engine) -> None:
    """Compared with the same clock here: one job computes for at least `held_seconds`, for which the other waits."""
    began, go_on = threading.Event(), threading.Event()

    def hold_up() -> Steps[None]:
        began.set()
        yield from hold_until(go_on)

    submitted_at = time.perf_counter()
    holding, waiting = engine.submit(hold_up()), engine.submit(steps("waits", 1))
    await asyncio.to_thread(began.wait)
    held_at = time.perf_counter()
    await asyncio.sleep(0.05)
    held_seconds = time.perf_counter() - held_at
    go_on.set()
    held, waited = await holding, await waiting
    other_seconds = time.perf_counter() - submitted_at - held_seconds

    assert held.compute_seconds >= held_seconds
    assert waited.queue_seconds >= held_seconds
    assert 0 <= held.queue_seconds <= other_seconds
    assert 0 <= waited.compute_seconds <= other_seconds


class Session:
    """A session, which the engine does not look into."""


async def test_a_step_owns_all_cores_unless_other_sessions_had_work_in_the_last_few_steps() -> None:
    """An open session that asks for nothing, as one whose client does not read, takes nothing from the others."""
    free: list[bool] = []
    steps_taken: list[StepTime] = []

    def forward(wanted: Sequence[Feed | Encode], *, owns_all_cores: bool) -> list[str]:
        free.append(owns_all_cores)
        return [cast(FakeFeed, fed).name for fed in wanted]

    engine = Engine(lambda: None, compute=forward)
    engine.on_step = steps_taken.append
    one, other, idle = Session(), Session(), Session()
    try:
        await engine.submit(steps("one", 2), one)
        assert free == [True, True]
        await engine.submit(steps("idle", 1), idle)
        assert free.pop() is False
        await asyncio.gather(engine.submit(steps("one", 1), one), engine.submit(steps("other", 1), other))
        assert not any(free[2:]), "the third session had work just now"
        for _ in range(batch_window._ACTIVE_STEPS):
            await asyncio.gather(engine.submit(steps("one", 1), one), engine.submit(steps("other", 1), other))
        free.clear()
        await asyncio.gather(engine.submit(steps("one", 1), one), engine.submit(steps("other", 1), other))
        assert free == [True] or free == [False, False], "together in a step, or in turns"
        for _ in range(batch_window._ACTIVE_STEPS):
            await engine.submit(steps("one", 1), one)
        assert free[-1] is True
        assert engine.num_active_sessions == 1
    finally:
        engine.stop()
    assert steps_taken[-1].had_all_cores


async def test_a_verify_is_padded_unless_other_sessions_had_work_lately(engine: Engine) -> None:
    """An open stream that asks for nothing leaves a single session its cheaper width."""
    costs = StepCosts({1: {5: 0.030, 8: 0.020}})
    worker = cast(Worker, SimpleNamespace(engine=engine, costs=costs, model=tiny_model()))
    widths: list[int] = []

    def job() -> Steps[None]:
        widths.append(_pad(worker, 0, 5))
        yield feed("a")

    one, other = Session(), Session()
    await engine.submit(job(), one)
    await engine.submit(steps("other", 1), other)
    for _ in range(batch_window._ACTIVE_STEPS + 1):
        await engine.submit(job(), one)
    assert (widths[0], widths[1], widths[-1]) == (8, 5, 8)


@dataclass(eq=False)
class Adapted:
    """A session that the network with an adapter computes."""

    network: str


@dataclass(eq=False)
class Waiting:
    """A round of a session that waits for its step."""

    session: Hashable
    feed: Feed


@pytest.mark.parametrize(("adapter", "waits"), [("sql", True), ("chat", False), ("", False)])
def test_a_step_waits_for_no_session_that_cannot_share_it(adapter: str, waits: bool) -> None:
    """A session with another adapter has a step of its own."""
    waiting, straggler = Scheduler[Waiting](), Adapted("sql")
    own = cast(Feed, SimpleNamespace(wants_logits=True, num_tokens=1, network=adapter))
    waiting.window.expect(1.0)
    waiting.window.answered(straggler, 8.6)
    waiting.window.arrived(straggler, 9.0)
    waiting.window.answered(straggler, 9.0)  # it comes back after 0.4 seconds
    waiting.add(Waiting(Adapted(adapter), own), 9.0)
    jobs, wait_until = waiting.next_step(9.0)
    assert (not jobs) == (wait_until is not None) == waits

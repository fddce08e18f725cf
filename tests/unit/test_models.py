"""The registry of models: every request is served by workers that are there, within the budget of memory."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from dataclasses import dataclass
from random import Random
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from coordinator.coordinator import Coordinator
from coordinator.models.choice import choose_model
from coordinator.models.kept_sessions import KeptSessions
from coordinator.models.loader import Loader
from coordinator.models.models import Models
from coordinator.models.served_model import ModelState, ServedModel, Shared
from coordinator.sessions.quota import Quotas
from coordinator.sessions.request_counts import RequestCounts
from coordinator.telemetry.metrics import CoordinatorMetrics
from specd.caller import Caller, CallerLimits
from specd.coordinator_settings import CoordinatorSettings
from specd.errors import (
    InvalidRequestError,
    NotFoundError,
    ResourceExhaustedError,
    SpecdError,
    StartupError,
    UnavailableError,
)
from specd.model_entries import ModelEntries, ModelEntry

SETTINGS = CoordinatorSettings.model_validate({"draft": "none"})
METRICS = CoordinatorMetrics(CollectorRegistry())
STEP_SECONDS = 0.001
ANYONE = Caller("")


class Workers(Loader):
    """A supervisor that starts and stops workers in no time, and knows the memory of each."""

    def __init__(self, budget_bytes: int | None) -> None:
        super().__init__()
        self.budget_bytes = budget_bytes
        self.num_bytes: dict[str, int] = {}  # of the models that are loaded, by key
        self.sizes: dict[str, int] = {}
        self.broken: set[str] = set()
        self.ended: set[str] = set()  # by themselves, which a supervisor knows
        self.num_loads = 0

    async def running(self) -> set[str]:
        return set(self.num_bytes)

    async def load(self, key: str) -> None:
        self.num_loads += 1
        self.num_bytes[key] = self.sizes[key]
        assert self.budget_bytes is None or sum(self.num_bytes.values()) <= self.budget_bytes
        await asyncio.sleep(STEP_SECONDS)
        if key in self.broken:
            del self.num_bytes[key]
            raise UnavailableError("MODEL_NOT_LOADED", f"{key} is broken", retry_after_seconds=1.0)

    async def unload(self, key: str) -> None:
        await asyncio.sleep(STEP_SECONDS)
        if key in self.ended:
            self.ended.remove(key)
        else:
            del self.num_bytes[key]


class Model(ServedModel):
    """A model without processes."""

    error: Exception | None = None  # of an attempt to open it

    async def open(self) -> Coordinator:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.coordinator = cast(Coordinator, object())
        return self.coordinator

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.coordinator = None


@dataclass
class World:
    workers: Workers
    models: Models
    num_requests: RequestCounts

    @classmethod
    def of(cls, *entries: ModelEntry, budget_bytes: int | None = None) -> World:
        workers = Workers(budget_bytes)
        for entry in entries:
            workers.sizes[entry.key] = entry.num_bytes
        num_requests = RequestCounts()
        models = Models(ModelEntries(entries, budget_bytes), new_model, workers, num_requests)
        return cls(workers, models, num_requests)

    async def request(
        self,
        name: str,
        seconds: float = 0.0,
        *,
        caller: Caller = ANYONE,
        waits: bool = True,
        session_id: str = "",
    ) -> str:
        """Use a model for this time, in which its workers must be there. Return the key that served it."""
        model = await choose_model(self.models.all, name, "", session_id)
        async with self.models.using(model, caller, waits=waits) as waiting:
            await waiting.ready()
            key = waiting.model.entry.key
            assert key in self.workers.num_bytes
            await asyncio.sleep(seconds)
            assert key in self.workers.num_bytes
            return key

    def replace(self, *entries: ModelEntry) -> None:
        for entry in entries:
            self.workers.sizes[entry.key] = entry.num_bytes
        self.models.replace(ModelEntries(entries, self.workers.budget_bytes))


def new_model(entry: ModelEntry, before: ServedModel | None) -> Model:
    sessions = before.sessions if before is not None else KeptSessions(SETTINGS, METRICS, None)
    return Model(entry, Shared(SETTINGS, None, Quotas(time.perf_counter)), METRICS, sessions)


def entry(name: str, num_bytes: int = 1, key: str = "", **fields: object) -> ModelEntry:
    return ModelEntry(name, "unix:target", key=key or name, num_bytes=num_bytes, **fields)  # type: ignore[arg-type]


@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    spare=st.integers(0, 6),
    num_requests=st.integers(1, 40),
)
def test_every_request_has_its_workers_and_the_budget_holds(
    seed: int, sizes: list[int], spare: int, num_requests: int
) -> None:
    """Requests of random length, clients that leave, loads that fail, models that change and idle ones."""

    async def run() -> None:
        random, budget = Random(seed), max(sizes) + spare
        entries = [entry(f"m{i}", size, idle_seconds=0.01) for i, size in enumerate(sizes)]
        if spare >= 4 and random.random() < 0.5:
            entries[0] = entry("m0", min(sizes[0], spare), pinned=True)
        world = World.of(*entries, budget_bytes=budget)
        await world.models.begin()
        requests: list[asyncio.Task[str]] = []
        for number in range(num_requests):
            name = f"m{random.randrange(len(entries))}"
            requests.append(asyncio.ensure_future(world.request(name, random.choice([0, 0, 0.002, 0.01]))))
            chance = random.random()
            if chance < 0.1:
                random.choice(requests).cancel()
            elif chance < 0.2:
                at = random.randrange(len(entries))
                before = entries[at]
                entries[at] = entry(before.name, before.num_bytes, f"{before.name}@{number}", pinned=before.pinned)
                world.replace(*entries)
            elif chance < 0.25:
                world.workers.broken ^= {random.choice(entries).key}
            elif chance < 0.3:
                world.models.review()
            if random.random() < 0.5:
                await asyncio.sleep(random.choice([0, 0.001, 0.005]))
        results = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 30)
        for result in results:
            assert isinstance(result, str | asyncio.CancelledError | UnavailableError), result
        world.workers.broken.clear()
        world.replace(*entries)  # what could not be loaded before
        for each in entries:  # nothing is stuck
            for _ in range(1000):
                if await asyncio.wait_for(world.request(each.name), 30) == each.key:
                    break
                await asyncio.sleep(0.001)
            else:
                raise AssertionError(f"{each.key} does not serve")
        await asyncio.sleep(0.02)
        assert set(world.workers.num_bytes) <= {each.key for each in entries}, "replaced models are unloaded"
        await world.models.close()

    asyncio.run(run())


async def test_the_model_that_was_not_used_for_longest_gives_its_memory() -> None:
    world = World.of(entry("a"), entry("b"), entry("c"), budget_bytes=2)
    for name in "abac":
        await world.request(name)
    assert set(world.workers.num_bytes) == {"a", "c"}


async def test_a_pinned_model_is_loaded_at_the_start_and_stays() -> None:
    world = World.of(entry("a", pinned=True), entry("b"), entry("c"), budget_bytes=2)
    await world.models.begin()
    assert set(world.workers.num_bytes) == {"a"}
    for name in "bcb":
        await world.request(name)
    world.models.review()
    await asyncio.sleep(0.01)
    assert set(world.workers.num_bytes) == {"a", "b"}
    assert world.workers.num_loads == 4


async def test_requests_that_wait_together_load_a_model_once() -> None:
    world = World.of(entry("a"), entry("b"), budget_bytes=1)
    served = await asyncio.gather(*(world.request(name, 0.001) for name in "abababab"))
    assert served == [*"abababab"]
    assert world.workers.num_loads == 2


async def test_requests_that_wait_for_a_model_count_to_the_limit_of_their_client() -> None:
    world = World.of(entry("a"), entry("b"))
    client = Caller("ci", CallerLimits(max_sessions=2))
    waiting = [asyncio.ensure_future(world.request(name, caller=client)) for name in "ab"]
    await asyncio.sleep(0)
    assert world.num_requests == {"ci": 2}
    with pytest.raises(ResourceExhaustedError, match="has 2 requests that run or wait"):
        await world.request("a", caller=client)
    assert await world.request("a", caller=Caller("other", client.limits)) == "a"
    assert await asyncio.gather(*waiting) == ["a", "b"]
    assert not world.num_requests


async def test_where_many_wait_for_a_model_one_client_does_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.models.waiting._MOST_WAITING", 4)
    world = World.of(entry("a"))
    many = [asyncio.ensure_future(world.request("a", caller=Caller("many"))) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhaustedError, match="no more may wait"):
        await world.request("a", caller=Caller("many"))
    few = [asyncio.ensure_future(world.request("a", caller=Caller("few"))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhaustedError, match="no more may wait"):
        await world.request("a", caller=Caller("few"))  # with 2 of 4, the two would turn each other away
    served = await asyncio.gather(*many, *few, return_exceptions=True)
    assert [isinstance(each, ResourceExhaustedError) for each in served] == [False] * 2 + [True] * 2 + [False] * 2
    assert not world.num_requests


async def test_a_busy_model_is_not_unloaded_and_takes_no_more_requests_while_another_needs_its_memory() -> None:
    world = World.of(entry("a"), entry("b"), budget_bytes=1)
    first = asyncio.ensure_future(world.request("a", 0.05))
    await asyncio.sleep(0.01)
    second = asyncio.ensure_future(world.request("b"))
    await asyncio.sleep(0.01)
    third = asyncio.ensure_future(world.request("a"))
    done, _ = await asyncio.wait({first, second, third}, return_when=asyncio.FIRST_COMPLETED)
    assert done == {first}
    done, _ = await asyncio.wait({second, third}, return_when=asyncio.FIRST_COMPLETED)
    assert done == {second}
    assert await third == "a"


async def test_an_idle_model_is_unloaded() -> None:
    world = World.of(entry("a", idle_seconds=0.01), entry("b", idle_seconds=60))
    await world.request("a")
    await world.request("b")
    await asyncio.sleep(0.02)
    world.models.review()
    await asyncio.sleep(0.01)
    assert set(world.workers.num_bytes) == {"b"}


async def test_a_request_that_does_not_wait_is_refused_and_the_model_loads() -> None:
    world = World.of(entry("a"))
    with pytest.raises(UnavailableError, match="the model 'a' is not loaded: it begins to load") as raised:
        await world.request("a", waits=False)
    assert (raised.value.reason, raised.value.retry_after_seconds) == ("MODEL_LOADING", 5.0)
    await asyncio.sleep(0.01)
    assert await world.request("a", waits=False) == "a"


async def test_a_model_that_cannot_be_loaded_says_why_and_is_tried_again() -> None:
    world = World.of(entry("a"), entry("b"))
    world.workers.broken = {"a"}
    results = await asyncio.gather(*(world.request("a") for _ in range(3)), return_exceptions=True)
    assert [str(each) for each in results] == ["a is broken"] * 3
    assert await world.request("b") == "b"
    world.workers.broken = set()
    assert await world.request("a") == "a"


async def test_workers_that_are_refused_are_stopped() -> None:
    world = World.of(entry("a"), entry("b"), budget_bytes=1)
    model = cast(Model, world.models.all[0])
    model.error = StartupError("its tokenizer differs")
    with pytest.raises(UnavailableError, match="its tokenizer differs"):
        await world.request("a")
    assert not world.workers.num_bytes
    assert await world.request("b") == "b"
    model.error = None
    assert await world.request("a") == "a"


async def test_what_has_been_replaced_is_forgotten() -> None:
    world = World.of(entry("a"))
    model = weakref.ref(world.models.all[0])
    running = asyncio.ensure_future(world.request("a", 0.03))
    await asyncio.sleep(0.01)
    world.replace(entry("a", key="a2"))
    await asyncio.sleep(0.01)
    assert await world.request("a") == "a2"
    assert await running == "a"
    del running
    await asyncio.sleep(0.01)
    gc.collect()
    assert model() is None


async def test_a_replacement_serves_when_it_is_loaded_and_the_old_one_until_its_requests_end() -> None:
    world = World.of(entry("a"), budget_bytes=2)
    running = asyncio.ensure_future(world.request("a", 0.05))
    await asyncio.sleep(0.01)
    world.replace(entry("a", key="a2"))
    assert await world.request("a") == "a", "until the new one is there"
    await asyncio.sleep(0.01)
    assert await world.request("a") == "a2"
    assert set(world.workers.num_bytes) == {"a", "a2"}
    assert await running == "a"
    await asyncio.sleep(0.01)
    assert set(world.workers.num_bytes) == {"a2"}


async def test_without_memory_for_both_a_replacement_waits_for_the_old_ones_requests() -> None:
    world = World.of(entry("a"), budget_bytes=1)
    running = asyncio.ensure_future(world.request("a", 0.03))
    await asyncio.sleep(0.01)
    world.replace(entry("a", key="a2"))
    await asyncio.sleep(0.01)
    assert await world.request("a") == "a2"
    assert await running == "a"


async def test_a_replacement_that_cannot_be_loaded_changes_nothing() -> None:
    world = World.of(entry("a"), budget_bytes=1)
    await world.request("a")
    world.workers.broken = {"a2"}
    world.replace(entry("a", key="a2"))
    await asyncio.sleep(0.01)
    assert await world.request("a") == "a"


async def test_a_model_that_is_no_longer_named_ends_with_its_requests() -> None:
    world = World.of(entry("a"), entry("b"))
    running = asyncio.ensure_future(world.request("a", 0.02))
    await asyncio.sleep(0.01)
    gone: list[str] = []
    world.models.on_gone = gone.append
    world.replace(entry("b"))
    with pytest.raises(NotFoundError, match="model is 'a': those that are served are 'b'"):
        await world.request("a")
    assert await running == "a"
    assert not gone
    await asyncio.sleep(0.01)
    assert not world.workers.num_bytes
    assert gone == ["a"]


async def test_workers_that_ended_for_good_are_loaded_again_for_the_next_request() -> None:
    world = World.of(entry("a"))
    await world.request("a")
    del world.workers.num_bytes["a"]
    world.workers.ended.add("a")
    world.workers.take({"event": "failed", "key": "a", "reason": "ended 11 times in a row"})
    assert world.models.all[0].state is ModelState.LEAVING
    assert await world.request("a") == "a"


async def test_a_session_keeps_its_model() -> None:
    world = World.of(entry("a"), entry("b", adapters=("sql",)))
    store = world.models.all[1].sessions.store
    store.finish(store.begin("s", ""), [1], None)
    assert [await world.request(name, session_id="s") for name in ("", "b", "sql")] == ["b", "b", "b"]
    with pytest.raises(InvalidRequestError, match="session s began with the model 'b', and the request names 'a'"):
        await world.request("a", session_id="s")
    assert await world.request("", session_id="unknown") == "a"
    assert await world.request("") == "a"


async def test_a_coordinator_that_comes_back_uses_the_workers_that_run() -> None:
    world = World.of(entry("a"), entry("b"))
    world.workers.num_bytes = {"b": 1}
    await world.models.begin()
    assert [each.name for each in world.models.present] == ["b"]
    with pytest.raises(SpecdError, match="not loaded"):
        await world.request("a", waits=False)

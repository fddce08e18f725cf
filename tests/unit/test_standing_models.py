"""Models with workers that run all the time: each serves as soon as its target is there, also while others are away."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from coordinator.coordinator import Coordinator
from coordinator.models import models as models_module
from coordinator.models.choice import choose_model
from coordinator.models.kept_sessions import KeptSessions
from coordinator.models.loader import Loader
from coordinator.models.models import Models
from coordinator.models.served_model import ModelState, ServedModel, Shared
from coordinator.sessions.quota import Quotas
from coordinator.telemetry.metrics import CoordinatorMetrics
from coordinator.workers.changes import Changes
from specd.caller import Caller
from specd.coordinator_settings import CoordinatorSettings
from specd.errors import InternalError, NotFoundError, StartupError, UnavailableError
from specd.model_entries import ModelEntries, ModelEntry
from tests.unit import test_models
from tests.unit.test_models import World, entry

SETTINGS = CoordinatorSettings.model_validate({"draft": "none"})
METRICS = CoordinatorMetrics(CollectorRegistry())
MOMENT = 0.01


class Hosts:
    """The addresses at which targets are, and those of which the target is refused."""

    def __init__(self, *there: str) -> None:
        self.there = {f"unix:{each}" for each in there}
        self.changes = Changes()
        self.refused: set[str] = set()
        self.error: Exception | None = None  # a fault of the coordinator's own, in each attempt
        self.num_open = 0

    def come(self, target: str) -> None:
        """Let a target come."""
        self.there.add(f"unix:{target}")
        self.changes.notify()


class Model(ServedModel):
    """A model without processes, with a target that is there or away."""

    hosts: Hosts

    @property
    def is_connected(self) -> bool:
        return self.coordinator is not None

    async def open(self) -> Coordinator:
        await self.hosts.changes.wait_until(lambda: self.entry.target in self.hosts.there, math.inf)
        if self.hosts.error is not None:
            raise self.hosts.error
        if self.entry.target in self.hosts.refused:
            raise StartupError(f"the target at {self.entry.target} is refused")
        self.coordinator = cast(Coordinator, object())
        self.hosts.num_open += 1
        return self.coordinator

    async def close(self) -> None:
        if self.coordinator is not None:
            self.hosts.num_open -= 1
        self.coordinator = None


def entries(**addresses: str) -> ModelEntries:
    return ModelEntries(tuple(ModelEntry(name, f"unix:{address}") for name, address in addresses.items()))


def models_at(hosts: Hosts, **addresses: str) -> Models:
    def new_model(entry: ModelEntry, before: ServedModel | None) -> Model:
        sessions = before.sessions if before is not None else KeptSessions(SETTINGS, METRICS, None)
        model = Model(entry, Shared(SETTINGS, None, Quotas(time.perf_counter)), METRICS, sessions)
        model.hosts = hosts
        return model

    return Models(entries(**addresses), new_model, Loader())


@asynccontextmanager
async def request(models: Models, name: str) -> AsyncIterator[str]:
    """Use a model; the value is the address of its target."""
    async with models.using(await choose_model(models.all, name), Caller("")) as waiting:
        await waiting.ready()
        yield waiting.model.entry.target


async def served_by(models: Models, name: str) -> str:
    async with request(models, name) as address:
        return address


async def is_away(models: Models, name: str) -> bool:
    try:
        await served_by(models, name)
    except UnavailableError as error:
        assert error.reason == "STARTING"
        assert f"the target worker of the model {name!r}" in str(error)
        return True
    return False


async def test_a_target_that_is_away_holds_up_no_other_model() -> None:
    hosts = Hosts("a", "c")
    models = models_at(hosts, a="a", b="b", c="c")
    await models.begin(patience_seconds=MOMENT)
    assert await served_by(models, "a") == "unix:a"
    assert await served_by(models, "c") == "unix:c"
    assert await is_away(models, "b")
    hosts.come("b")
    await asyncio.sleep(MOMENT)
    assert await served_by(models, "b") == "unix:b"
    await models.close()
    assert hosts.num_open == 0


async def test_the_start_waits_until_one_model_can_serve() -> None:
    hosts = Hosts()
    models = models_at(hosts, a="a", b="b")
    starting = asyncio.ensure_future(models.begin())
    await asyncio.sleep(MOMENT)
    assert not starting.done()
    hosts.come("b")
    await starting
    assert await served_by(models, "b") == "unix:b"
    await models.close()


async def test_a_refused_target_ends_the_start_and_later_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models_module, "_RETRY_SECONDS", MOMENT)
    hosts = Hosts("a", "b")
    hosts.refused = {"unix:b"}
    models = models_at(hosts, a="a", b="b")
    with pytest.raises(StartupError, match="the target at unix:b is refused"):
        await models.begin(patience_seconds=1.0)
    await models.close()

    hosts = Hosts("a")
    hosts.refused = {"unix:b"}
    models = models_at(hosts, a="a", b="b")
    await models.begin()
    hosts.come("b")
    await asyncio.sleep(MOMENT)
    assert await is_away(models, "b")
    hosts.refused.clear()
    await asyncio.sleep(3 * MOMENT)
    assert await served_by(models, "b") == "unix:b"
    await models.close()


async def test_a_fault_of_ours_does_not_end_the_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models_module, "_RETRY_SECONDS", MOMENT)
    hosts = Hosts("a")
    models = models_at(hosts, a="a", b="b")
    await models.begin()
    hosts.error = RuntimeError("a fault")
    with capture_logs() as logs:
        hosts.come("b")
        await asyncio.sleep(MOMENT)
    assert {(each["event"], each["reason"], each["exc_info"]) for each in logs} == {
        ("a model cannot be served", "RuntimeError('a fault')", True)
    }
    hosts.error = None
    await asyncio.sleep(3 * MOMENT)
    assert await served_by(models, "b") == "unix:b"
    await models.close()


async def test_a_fault_of_ours_ends_the_requests_that_wait_for_a_load() -> None:
    """With a message that has nothing of the fault's own, and no worker is left."""
    world = World.of(entry("a"))
    model = cast(test_models.Model, world.models.all[0])
    model.error = RuntimeError("a secret")
    with pytest.raises(InternalError, match=r"the model 'a' cannot be loaded: see the log$"):
        await world.request("a")
    assert not world.workers.num_bytes
    model.error = None
    assert await world.request("a") == "a"


async def test_the_file_of_models_is_read_again() -> None:
    """An address that has changed serves as soon as its target is there; until then the one before does."""
    hosts = Hosts("a", "a2", "new")
    models = models_at(hosts, a="a", wrong="wrong")
    await models.begin()
    async with request(models, "a") as address:
        assert address == "unix:a"
        models.replace(entries(a="a2", wrong="right", new="new"))
        await asyncio.sleep(MOMENT)
        assert await served_by(models, "a") == "unix:a2"
        assert await served_by(models, "new") == "unix:new"
        assert hosts.num_open == 3, "the one before has a request"
    await asyncio.sleep(MOMENT)
    assert hosts.num_open == 2

    assert await is_away(models, "wrong")
    hosts.come("right")
    await asyncio.sleep(MOMENT)
    assert await served_by(models, "wrong") == "unix:right"

    models.replace(entries(a="away", wrong="right"))
    await asyncio.sleep(MOMENT)
    assert await served_by(models, "a") == "unix:a2"
    with pytest.raises(NotFoundError, match="'new'"):
        await served_by(models, "new")
    models.replace(entries(a="a", wrong="right"))  # it does not wait for the address in between
    await asyncio.sleep(MOMENT)
    assert await served_by(models, "a") == "unix:a"
    models.replace(entries(a="away", wrong="right"))
    models.replace(entries(a="a", wrong="right"))
    hosts.come("away")
    await asyncio.sleep(MOMENT)
    assert await served_by(models, "a") == "unix:a"
    assert hosts.num_open == 2
    await models.close()
    assert hosts.num_open == 0


async def test_a_model_that_never_came_can_be_removed() -> None:
    models = models_at(Hosts("a"), a="a", b="b")
    gone: list[str] = []
    models.on_gone = gone.append
    await models.begin()
    away = models.all[1]
    models.replace(entries(a="a"))
    await asyncio.sleep(MOMENT)
    assert gone == ["b"]
    assert away.state is ModelState.UNLOADED
    assert away.loading is None
    await models.close()

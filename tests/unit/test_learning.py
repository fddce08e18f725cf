"""What the planner has learnt survives a restart, and no file can harm it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.planner.memory import Memory
from coordinator.planner.planner import Planner
from coordinator.planner.session_planner import SessionPlanner
from specd.model_info import ModelInfo
from specd.sampling import Sampling
from specd.vocabulary import TokenSource
from tests.unit.simulation import Simulation, World


def model(fingerprint: str) -> ModelInfo:
    return ModelInfo(fingerprint, "llama", fingerprint, "v", 10, 100, (0,), "float32", "cpu")


def memory_of(planner: Planner, draft: str = "draft") -> Memory:
    return Memory(planner, lambda: (model("target"), model(draft)))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specd"


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob("planner-*"))


async def test_a_restart_forgets_nothing(cache: Path) -> None:
    simulation = Simulation(World(lambda _: 0.05, contention=2.0))
    simulation.run(num_sessions=16, at_once=4, tokens=96)
    await memory_of(simulation.planner).keep()
    again = Simulation(simulation.world).planner
    assert SessionPlanner(again, Sampling(), client="").plan().limit(TokenSource.DRAFT) > 0, "it would draft"
    again = Simulation(simulation.world).planner
    memory_of(again).recall()
    assert again.learnt() == simulation.planner.learnt()
    assert again.costs.seconds(4, 3) == pytest.approx(simulation.planner.costs.seconds(4, 3))
    sessions = [SessionPlanner(again, Sampling(), client="") for _ in range(4)]
    assert not any(session.plan().limit(TokenSource.DRAFT) for session in sessions)


async def test_pairs_are_kept_apart(cache: Path) -> None:
    simulation = Simulation(World())
    simulation.run(num_sessions=4, at_once=1, tokens=64)
    await memory_of(simulation.planner).keep()
    other = Simulation(World()).planner
    memory_of(other, draft="another").recall()
    assert other.learnt() == Simulation(World()).planner.learnt()
    await memory_of(simulation.planner, draft="another").keep()
    assert len(files(cache)) == 2


async def test_while_a_draft_is_away_its_pair_is_kept(cache: Path) -> None:
    """A draft may end before its coordinator, as a canary does that was taken back."""
    simulation, models = Simulation(World()), [model("target"), None]
    memory = Memory(simulation.planner, lambda: models)
    memory.recall()
    models[1] = model("draft")
    simulation.run(num_sessions=1, at_once=1, tokens=64)
    await memory.keep()
    models[1] = None
    simulation.run(num_sessions=1, at_once=1, tokens=64)
    await memory.keep()
    again = Simulation(World()).planner
    memory_of(again).recall()
    assert again.learnt() == simulation.planner.learnt()
    assert len(files(cache)) == 1


async def test_nothing_is_written_without_rounds(cache: Path) -> None:
    simulation = Simulation(World())
    memory = memory_of(simulation.planner)
    await memory.keep()
    assert files(cache) == []
    simulation.run(num_sessions=1, at_once=1, tokens=64)
    await memory.keep()
    (path,) = files(cache)
    path.unlink()
    await memory.keep()
    assert files(cache) == []


async def test_the_file_is_small_and_names_no_client(cache: Path) -> None:
    planner = Simulation(World()).planner
    for number in range(200):
        for temperature in (0.0, 0.5, 1.0, 2.0):
            SessionPlanner(planner, Sampling(temperature=temperature), client=f"somebody {number}").close()
    planner.num_rounds = 1
    await memory_of(planner).keep()
    (path,) = files(cache)
    assert path.stat().st_size < 100_000
    assert "somebody" not in path.read_text()


def damaged(change: Callable[[Any], object]) -> str:
    simulation = Simulation(World())
    simulation.run(num_sessions=4, at_once=2, tokens=64)
    learnt = json.loads(json.dumps(simulation.planner.learnt()))
    change(learnt)
    return json.dumps(learnt)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"costs": {}, "clients": 3}',
        damaged(lambda learnt: learnt["costs"].update({"x": [1.0, 1.0, 1]})),
        damaged(lambda learnt: learnt["costs"].update({"0": [float("nan"), 1.0, 1]})),
        damaged(lambda learnt: learnt["costs"].update({"0": [1.0, 0.0, 1]})),
        damaged(lambda learnt: learnt["costs"].update({"0": [1.0, "1", 1]})),
        damaged(lambda learnt: learnt["costs"].update({"0": [1.0, 1.0, -1]})),
        damaged(lambda learnt: learnt["clients"].update({"a": {"b": [0.7, [1.0], [1.0]]}})),
        damaged(lambda learnt: learnt["clients"].update({"a": {"b": [0.7, [1.0] * 8, [2.0] * 8]}})),
        damaged(lambda learnt: learnt["clients"].update({"a": {"b": [0.7, [1e9] * 8, [1.0] * 8]}})),
        damaged(lambda learnt: learnt["clients"].update({"a": {"b": [float("nan"), [1.0] * 8, [1.0] * 8]}})),
        damaged(lambda learnt: learnt["clients"].update({"a": {"b": [0.7, [float("nan")] * 8, [1.0] * 8]}})),
    ],
)
async def test_a_damaged_file_is_left_alone(cache: Path, text: str) -> None:
    simulation = Simulation(World())
    planner = simulation.planner
    planner.num_rounds = 1
    await memory_of(planner).keep()
    (path,) = files(cache)
    path.write_text(text)
    memory_of(planner).recall()
    assert planner.learnt() == Simulation(World()).planner.learnt()
    assert simulation.run(num_sessions=4, at_once=1, tokens=64) > 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(data=st.binary(max_size=2000))
async def test_no_bytes_do_harm(cache: Path, data: bytes) -> None:
    planner = Simulation(World()).planner
    planner.num_rounds = 1
    await memory_of(planner).keep()
    files(cache)[0].write_bytes(data)
    memory_of(planner).recall()
    assert SessionPlanner(planner, Sampling(), client="").plan().limit(TokenSource.DRAFT) > 0


@pytest.mark.parametrize("is_there", [False, True])
async def test_a_directory_that_cannot_be_written_costs_only_the_memory(
    cache: Path, monkeypatch: pytest.MonkeyPatch, *, is_there: bool
) -> None:
    if is_there:  # where a file is to be renamed to is a directory
        planner = Simulation(World()).planner
        planner.num_rounds = 1
        await memory_of(planner).keep()
        (path,) = files(cache)
        path.unlink()
        (path / "full").mkdir(parents=True)
    else:
        monkeypatch.setattr(os, "access", lambda *_: False)
    simulation = Simulation(World())
    memory = memory_of(simulation.planner)
    memory.recall()
    simulation.run(num_sessions=2, at_once=1, tokens=64)
    await memory.keep()
    assert [path for path in files(cache) if path.is_file()] == []

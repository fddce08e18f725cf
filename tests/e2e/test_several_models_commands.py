"""`specd generate`, `chat`, `top` and `health` with several models, of which one is loaded at a time."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from specd.client.client import Client
from specd.model_processes import ModelPlan, ModelPlans
from specd.settings import EMBEDDED_DRAFT
from specd.supervisor import Stack
from specd.worker_group import WorkerModels
from tests.e2e.processes import complaint, read_metric, run_specd
from tests.e2e.terminal import CTRL_C, Terminal
from tests.gateway.arranged_model import SCRIPTS, save_arranged_model


@pytest.fixture(scope="module")
async def several(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """`first` and `second` chat, and `plain` completes texts."""
    arranged = save_arranged_model(tmp_path_factory.mktemp("models") / "arranged")
    models = {"first": arranged, "second": arranged, "plain": EMBEDDED_DRAFT}
    plans = [ModelPlan(WorkerModels(path, "", name=name), num_bytes=100) for name, path in models.items()]
    async with Stack(models=ModelPlans(tuple(plans), budget_bytes=100)) as running:
        yield running


def beside_supervisor(test: Callable[..., None]) -> Callable[..., Awaitable[None]]:
    """Run a test in a thread, because the supervisor that starts and stops workers needs the event loop."""

    @functools.wraps(test)
    async def run(**fixtures: Any) -> None:
        await asyncio.to_thread(test, **fixtures)

    return run


def load(stack: Stack, name: str) -> None:
    with Client(stack.address) as client:
        client.describe(name, timeout_seconds=None)


@beside_supervisor
def test_generate_waits_for_its_model_or_does_not(several: Stack) -> None:
    load(several, "first")
    generate = ("generate", "def area(", "--address", several.address, "-n", "4", "--model", "plain")
    refused = run_specd(*generate, "--refuse-unloaded")
    assert refused.returncode == 1
    assert "the model 'plain' is not loaded: it begins to load" in complaint(refused.stderr)
    done = run_specd(*generate)
    assert done.returncode == 0
    assert "loading" not in done.stderr  # it is no terminal
    assert run_specd(*generate, "--refuse-unloaded").stdout == done.stdout


@beside_supervisor
@pytest.mark.thorough
def test_generate_shows_progress_at_a_terminal(several: Stack) -> None:
    load(several, "first")
    with Terminal("generate", "def area(", "--address", several.address, "-n", "4", "--model", "plain") as terminal:
        terminal.wait_for("loading plain, ")
        terminal.wait_for("4 tokens")
        assert terminal.exit_code() == 0
        assert not any("loading" in line for line in terminal.screen)


@beside_supervisor
@pytest.mark.thorough
def test_a_conversation_changes_its_model(several: Stack, tmp_path: Path) -> None:
    load(several, "plain")
    with Terminal("chat", "--address", several.address, XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.wait_for("loading first")
        terminal.wait_for("first. /help")
        terminal.type("hello\n")
        terminal.wait_for(re.escape(SCRIPTS["hello"]))
        terminal.type("/model\n")
        terminal.wait_for(r"\* first +ready\s+second +unloaded\s+plain +unloaded")
        terminal.type("/model second\n")
        terminal.wait_for("loading second")
        terminal.wait_for("second continues the conversation")
        terminal.type("sunny\n")
        terminal.wait_for(re.escape(SCRIPTS["sunny"]))
        terminal.type("/model\n")
        terminal.wait_for(r"  first +unloaded\s+\* second +ready")
        terminal.type("/model plain\n")
        terminal.wait_for("plain cannot chat")
        terminal.type("/model\n")
        terminal.wait_for(r"\* second +unloaded\s+plain +ready")
        terminal.type("hello\n")  # which loads it again
        terminal.wait_for("loading second, ")
        terminal.wait_for(re.escape(SCRIPTS["hello"]))


@beside_supervisor
def test_ctrl_c_ends_the_wait_for_a_model(several: Stack, tmp_path: Path) -> None:
    load(several, "first")
    with Terminal("chat", "--address", several.address, XDG_STATE_HOME=str(tmp_path)) as terminal:
        terminal.wait_for("first. /help")
        terminal.type("/model second\n")
        terminal.wait_for("loading second")
        terminal.type(CTRL_C)
        terminal.wait_for("second is not waited for, and still loads")
        terminal.type("hello\n")
        terminal.wait_for(re.escape(SCRIPTS["hello"]))
        terminal.type("/model\n")
        terminal.wait_for(r"\* first ")


@beside_supervisor
def test_top_shows_the_models_and_their_sum(several: Stack) -> None:
    load(several, "first")
    address = several.coordinator.facts["metrics_address"]
    with Client(several.address) as client:
        client.generate("hello", model="first", max_tokens=8).completion()
    done = run_specd("top", address, "--once", "--interval", "0.2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("specd top  3 models  127.0.0.1:")
    assert re.search(r"models +first +0 running", done.stdout)
    assert re.search(r"^ +second +unloaded", done.stdout, re.MULTILINE)
    most = read_metric(several.coordinator, "specd_max_sessions", model="first")
    assert most > 0
    assert re.search(rf"sessions +running +0 of {most:.0f} *$", done.stdout, re.MULTILINE)
    names = ("first", "second", "plain")
    gained, rounds = (
        sum(read_metric(several.coordinator, f"specd_{counter}_total", model=name) for name in names)
        for counter in ("generated_tokens", "rounds")
    )
    assert re.search(rf"gained a round .* {gained / rounds:.2f} *$", done.stdout, re.MULTILINE)


@beside_supervisor
def test_metrics_of_a_model_follow_its_state(several: Stack) -> None:
    load(several, "first")
    load(several, "plain")
    for name, is_ready in (("first", 0.0), ("plain", 1.0)):
        states = {"ready": is_ready, "unloaded": 1 - is_ready, "loading": 0.0, "waiting": 0.0, "leaving": 0.0}
        for state, value in states.items():
            assert read_metric(several.coordinator, "specd_model_state", model=name, state=state) == value
        assert read_metric(several.coordinator, "specd_target_available", model=name) == is_ready
        assert (read_metric(several.coordinator, "specd_capacity_bytes", model=name) > 0) == bool(is_ready)


@beside_supervisor
def test_a_coordinator_without_a_loaded_model_is_healthy(several: Stack) -> None:
    done = run_specd("health", several.address)
    assert (done.returncode, done.stdout) == (0, f"{several.address} SERVING\n")

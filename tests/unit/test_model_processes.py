"""The groups of workers follow the coordinator, also one that starts while another's model ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from specd.child import Child
from specd.model_processes import ModelPlan, ModelPlans, ModelProcesses
from specd.worker_group import WorkerGroup, WorkerModels


class Group:
    """A group that starts at once, and ends when it may."""

    def __init__(self) -> None:
        self.target_addresses, self.draft_address = "unix:/t", ""
        self.children: list[Child] = []
        self.may_end = asyncio.Event()

    async def start(self) -> None:
        pass

    async def wait(self) -> None:
        await asyncio.Event().wait()

    async def stop(self) -> None:
        await self.may_end.wait()


class Supervised:
    """The processes of one model, with the groups that were made for it and the messages to the coordinator."""

    def __init__(self, directory: Path) -> None:
        self.groups: list[Group] = []
        self.told: list[tuple[str, Any]] = []
        plans = ModelPlans((ModelPlan(WorkerModels("target", name="coder")),))
        self.processes = ModelProcesses(plans, directory / "models.json", self._new_group, self._tell)

    def _new_group(self, *_: Any) -> WorkerGroup:
        self.groups.append(Group())
        return cast("WorkerGroup", self.groups[-1])

    def _tell(self, *, event: str, **fields: Any) -> None:
        self.told.append((event, fields.get("keys", fields.get("key"))))

    async def ask(self, *requests: str) -> Sequence[tuple[str, Any]]:
        """Ask for these things, one after the other; return the messages to the coordinator."""
        self.told.clear()
        for request in requests:
            self.processes.take({"request": request, "key": "1"})
            await asyncio.sleep(0.001)
        return self.told


async def ended(supervised: Supervised, group: int) -> Sequence[tuple[str, Any]]:
    """Let a group end; return the messages that follow."""
    supervised.told.clear()
    supervised.groups[group].may_end.set()
    await asyncio.sleep(0.01)
    return supervised.told


async def test_a_model_that_ends_is_loaded_again_for_a_coordinator_that_starts(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path)
    assert await supervised.ask("load") == [("loaded", "1")]
    running = len(supervised.groups)
    # The coordinator dies after it has asked for the end. The next one must not be told that the model is there.
    assert await supervised.ask("unload", "list", "load", "load") == [("running", [])]
    assert len(supervised.groups) == running  # the memory of the old workers is not free yet
    assert await ended(supervised, running - 1) == [("loaded", "1")]
    assert len(supervised.groups) == running + 1
    assert await supervised.ask("list", "load") == [("running", ["1"]), ("loaded", "1")]
    supervised.groups[-1].may_end.set()
    await supervised.processes.stop()


@pytest.mark.parametrize("requests", [["unload"], ["unload", "unload"], ["unload", "load", "unload"]])
async def test_the_last_request_counts(tmp_path: Path, requests: Sequence[str]) -> None:
    supervised = Supervised(tmp_path)
    await supervised.ask("load")
    running = len(supervised.groups)
    assert await supervised.ask(*requests) == []
    assert set(await ended(supervised, running - 1)) == {("unloaded", "1")}
    assert len(supervised.groups) == running
    assert await supervised.ask("list", "unload") == [("running", []), ("unloaded", "1")]

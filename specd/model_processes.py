"""The workers of several models, which start and stop as the coordinator asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from specd.child import Child
from specd.model_entries import model_entries, model_entry
from specd.startup_error import StartupError
from specd.worker_group import WorkerGroup, WorkerModels

log = structlog.get_logger()


@dataclass(frozen=True)
class ModelPlan:
    """A model that is to be served under a name, with its workers and their memory; ModelEntry explains the fields."""

    workers: WorkerModels
    adapters: tuple[str, ...] = ()
    num_bytes: int = 0
    pinned: bool = False
    idle_seconds: float = float("inf")

    @property
    def name(self) -> str:
        """The name by which requests choose it."""
        return self.workers.name


@dataclass(frozen=True)
class ModelPlans:
    """The models that are to be served, within a budget of memory; None is no limit."""

    plans: tuple[ModelPlan, ...]
    budget_bytes: int | None = None


@dataclass
class _Running:
    """A group of workers that runs, starts, or ends."""

    group: WorkerGroup
    is_ready: bool = False
    is_ending: bool = False
    is_wanted_again: bool = False  # by a coordinator that started while the group ended
    task: asyncio.Task[None] | None = field(default=None)

    @property
    def serves(self) -> bool:
        """Whether requests can use it."""
        return self.is_ready and not self.is_ending


class ModelProcesses:
    """Starts and stops groups of workers, each by the key that it has in the coordinator's file of models.

    A model that changes gets a new key, so that the old workers serve until the new ones are ready.
    """

    def __init__(
        self,
        plans: ModelPlans,
        file: Path,
        new_group: Callable[[str, WorkerModels], WorkerGroup],
        tell: Callable[..., None],
    ) -> None:
        """Write the file of models. Raises StartupError if the plans contradict each other.

        `new_group` makes the group of a key; `tell` sends the coordinator a message.
        """
        self._file, self._new_group, self._tell = file, new_group, tell
        self._plans: dict[str, ModelPlan] = {}  # by key, also earlier ones, which the coordinator may still want
        self._current: set[str] = set()
        self._running: dict[str, _Running] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._num_versions = 0
        self._write(plans)

    @property
    def children(self) -> list[Child]:
        """The workers that run, start or end."""
        return [child for running in self._running.values() for child in running.group.children]

    def replace(self, plans: ModelPlans) -> None:
        """Serve these models from now on. What has not changed keeps its workers.

        Raises StartupError, and changes nothing, if the plans contradict each other.
        """
        self._write(plans)
        self._tell(event="models")

    def take(self, request: Mapping[str, Any]) -> None:
        """Do what the coordinator asks for."""
        match request:
            case {"request": "list"}:  # from a coordinator that has just started
                for key in [key for key in self._running if key not in self._current]:
                    self._unload(key)
                self._tell(event="running", keys=[key for key, each in self._running.items() if each.serves])
            case {"request": "load", "key": str(key)}:
                self._load(key)
            case {"request": "unload", "key": str(key)}:
                self._unload(key)

    def show_progress(self, key: str, process: str, progress: Mapping[str, Any]) -> None:
        """Tell the coordinator how far the start of a process is."""
        self._tell(event="progress", key=key, process=process, **progress)

    async def stop(self) -> None:
        """Stop all workers."""
        for key in [*self._running]:
            self._unload(key)
        await asyncio.gather(*self._stopping, return_exceptions=True)

    def kill(self) -> None:
        """Kill all workers."""
        for child in self.children:
            child.kill()

    def _write(self, plans: ModelPlans) -> None:
        entries, keys = [], dict[str, ModelPlan]()
        current = {plan.name: key for key, plan in self._plans.items() if key in self._current}
        for plan in plans.plans:
            key = current.get(plan.name, "")
            if not key or self._plans[key].workers != plan.workers:
                self._num_versions += 1
                key = str(self._num_versions)
            keys[key] = plan
            group = self._new_group(key, plan.workers)
            entries.append(
                model_entry(
                    plan.name,
                    group.target_addresses,
                    draft=group.draft_address,
                    key=key,
                    adapters=plan.adapters,
                    num_bytes=plan.num_bytes,
                    pinned=plan.pinned,
                    idle_seconds=plan.idle_seconds,
                )
            )
        content = model_entries(entries, plans.budget_bytes).to_json()
        partial = self._file.with_suffix(".new")  # renamed when it is whole: the coordinator may read it now
        partial.write_text(content)
        partial.rename(self._file)
        self._plans |= keys
        self._current = set(keys)

    def _load(self, key: str) -> None:
        running = self._running.get(key)
        if running is not None:
            running.is_wanted_again = running.is_ending
            if running.serves:
                self._tell(event="loaded", key=key)
            return
        plan = self._plans[key]
        running = self._running[key] = _Running(self._new_group(key, plan.workers))
        running.task = asyncio.ensure_future(self._run(key, running))

    async def _run(self, key: str, running: _Running) -> None:
        """Start a group, and watch it until its last target is given up."""
        reason = ""
        try:
            await running.group.start()
            running.is_ready = True
            self._tell(event="loaded", key=key)
            await running.group.wait()
        except (StartupError, OSError) as error:
            reason = str(error)
            log.error("a model cannot be served", model=self._name_of(key), reason=reason)
        finally:
            await asyncio.shield(running.group.stop())
        self._running.pop(key, None)
        self._tell(event="failed", key=key, reason=reason)

    def _unload(self, key: str) -> None:
        running = self._running.get(key)
        if running is None or running.task is None:
            self._tell(event="unloaded", key=key)
            return
        running.is_wanted_again = False
        if running.is_ending:
            return
        running.is_ending = True
        stopping = asyncio.ensure_future(self._stop(key, running))
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)

    async def _stop(self, key: str, running: _Running) -> None:
        assert running.task is not None
        running.task.cancel()
        await asyncio.gather(running.task, return_exceptions=True)
        if self._running.get(key) is running:
            del self._running[key]
        if running.is_wanted_again:
            self._load(key)
        else:
            self._tell(event="unloaded", key=key)

    def _name_of(self, key: str) -> str:
        return self._plans[key].name

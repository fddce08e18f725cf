"""The workers with the same role, which share the sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from coordinator.workers.changes import Changes
from coordinator.workers.remote_worker import RemoteWorker
from specd.model_info import ModelInfo

Stream = TypeVar("Stream")


class Workers(Generic[Stream]):
    """Workers that may be away, and the changes of all of them."""

    def __init__(self, members: Iterable[RemoteWorker[Stream]] = (), *, fault: str = "") -> None:
        """`fault` is the reason for programs while no worker is known."""
        self.members: list[RemoteWorker[Stream]] = []
        self.changes = Changes()
        self.on_members: Callable[[], None] = lambda: None  # called when workers are added or removed
        self._nobody = RemoteWorker[Stream](fault)
        for worker in members:
            self.add(worker)

    def add(self, worker: RemoteWorker[Stream]) -> None:
        """Add a worker, also while sessions run."""
        worker.changes = self.changes
        self.members.append(worker)
        self.on_members()

    def remove(self, worker: RemoteWorker[Stream]) -> bool:
        """Remove a worker that no longer comes; return whether it is not needed as the last one."""
        if len(self.members) == 1:
            return False
        self.members.remove(worker)
        self.on_members()
        self.changes.notify()
        return True

    @property
    def ready(self) -> list[RemoteWorker[Stream]]:
        """The workers that are there with a model that can be used."""
        return [worker for worker in self.members if worker.model is not None]

    @property
    def first(self) -> RemoteWorker[Stream]:
        """The first worker that is ready, or else the first one; without any, one that never comes."""
        return next((worker for worker in self.members if worker.model is not None), [*self.members, self._nobody][0])

    @property
    def model(self) -> ModelInfo | None:
        """The model of the workers, if one is ready."""
        return self.first.model

    @property
    def refusal(self) -> str:
        """The reason, for people, that no worker can be used, if all workers were refused."""
        refusals = [worker.refusal for worker in self.members]
        return refusals[0] if refusals and all(refusals) else ""

    async def wait_until_judged(self, timeout_seconds: float) -> bool:
        """Wait until a worker is ready, or all are there and were refused; return whether it is so."""
        return await self.changes.wait_until(lambda: bool(self.model or self.refusal), timeout_seconds)

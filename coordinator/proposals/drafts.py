"""The draft workers, and the choice of one of them for a session."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from coordinator.workers.remote_worker import RemoteWorker
from coordinator.workers.workers import Workers
from specd.step_costs import MovingAverage

Stream = TypeVar("Stream")

_WEIGHT = 1 / 16  # of a proposal in the average time of the way to a worker and back
_DRAFT_TOKENS = 4  # of the proposal by which workers are compared


class Drafts(Generic[Stream]):
    """Draft workers with the target's tokenizer. Any of them may propose for any session, and change at any time."""

    def __init__(self, workers: Workers[Stream]) -> None:
        self.workers = workers
        self._num_sessions = WeakKeyDictionary[RemoteWorker[Stream], int]()
        self._wire_seconds = WeakKeyDictionary[RemoteWorker[Stream], MovingAverage]()

    def best(self, apart_from: Collection[RemoteWorker[Stream]] = ()) -> RemoteWorker[Stream]:
        """Return the worker that probably proposes soonest for one more session, if possible none of these."""
        ready = self.workers.ready
        others = [worker for worker in ready if worker not in apart_from] or ready
        return min(others, key=self._proposal_seconds, default=self.workers.first)

    def has_others(self, workers: Collection[RemoteWorker[Stream]]) -> bool:
        """Return whether another worker than these is ready."""
        return any(other not in workers for other in self.workers.ready)

    def count(self, worker: RemoteWorker[Stream], num_sessions: int) -> None:
        """Count sessions that begin at a worker, or with a negative number leave it."""
        self._num_sessions[worker] = self._num_sessions.get(worker, 0) + num_sessions

    def observe(self, worker: RemoteWorker[Stream], wire_seconds: float) -> None:
        """Learn how far away a worker is, from a proposal or from the wait for one that did not come."""
        self._wire_seconds.setdefault(worker, MovingAverage(_WEIGHT)).add(wire_seconds)

    def _proposal_seconds(self, worker: RemoteWorker[Stream]) -> tuple[float, int]:
        num_sessions = self._num_sessions.get(worker, 0)
        wire, costs = self._wire_seconds.get(worker), worker.step_costs
        seconds = costs.seconds(num_sessions + 1, _DRAFT_TOKENS) if costs is not None else 0.0
        return seconds + (wire.value if wire is not None else 0.0), num_sessions

"""A session's way to a target."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import structlog

from coordinator.core import Session, Verdict
from coordinator.replicas.replica import Replica
from coordinator.replicas.replicas import Replicas
from coordinator.sessions.admission import Admission
from coordinator.sessions.capacity import Capacity
from coordinator.sessions.place import Place
from coordinator.workers.remote_worker import RemoteWorker, WorkerLife
from coordinator.workers.verifier import TargetStream

log = structlog.get_logger()


class SessionRoute:
    """Leads a session to its target, and to another one when its own is lost, stops, is late or has no room.

    The other target must have the same model to the last byte, and compute with the same rounding.
    """

    def __init__(
        self,
        session: Session,
        place: Place,
        replicas: Replicas,
        admission: Admission,
        on_move: Callable[[Replica], None],
    ) -> None:
        """`on_move` is called with each further target of the session."""
        assert place.capacity is not None
        self._session, self._place = session, place
        self._replicas, self._admission = replicas, admission
        self._on_move = on_move
        self.replica = replicas.of(place.capacity)

    @property
    def worker(self) -> RemoteWorker[TargetStream]:
        """The session's present target."""
        return self.replica.worker

    def can_leave(self, life: WorkerLife | None) -> bool:
        """Return whether another target can continue the session after tokens of a target's life."""
        others = [replica for replica in self._replicas.that_continue(life) if replica is not self.replica]
        return any(self._place.num_bytes <= replica.capacity.num_bytes() for replica in others)

    async def leave(self, life: WorkerLife | None, timeout_seconds: float) -> bool:
        """Wait for the session's turn at another target; return False if none is left after this time.

        A session waits for a target that has no room for as long as a request would. Its own target counts as another
        if it was away and comes back, or if no other is left.
        """
        session, place, own = self._session, self._place, self.replica
        left, is_away = session.max_tokens - session.num_generated, self.worker.model is None
        num_tokens = len(session.token_ids) + place.num_tokens[1]  # with those of its source
        place.prompt = replace(place.prompt, num_tokens=num_tokens, max_tokens=left)

        def may_be_at(capacity: Capacity) -> bool:
            fitting = self._replicas.that_continue(life)
            others = fitting if is_away else [replica for replica in fitting if replica is not own] or fitting
            return self._replicas.of(capacity) in others

        moving = asyncio.ensure_future(self._admission.move(place, may_be_at))
        try:
            while not moving.done():
                await asyncio.wait({moving}, timeout=timeout_seconds)
                if not moving.done() and not self._replicas.that_continue(life):
                    return False
            moving.result()
        finally:
            moving.cancel()
        assert place.capacity is not None
        self.replica = self._replicas.of(place.capacity)
        if self.replica is not own:
            log.info("moved a session to another target", before=own.worker.address, address=self.worker.address)
            self._on_move(self.replica)
        return True

    def began(self, verdict: Verdict) -> None:
        """Note the first verdict of the session's present target."""
        self.replica.prefilled(self._place, verdict.reused_len, verdict.exchange)
        self._admission.capacities.prefilled(self._place)

    async def wait_until_ready(self, life: WorkerLife | None, timeout_seconds: float) -> bool:
        """Wait until the session's target is ready, or another one that can continue it; return whether one is."""
        changes = self._replicas.workers.changes
        return await changes.wait_until(lambda: self.worker.model is not None or self.can_leave(life), timeout_seconds)

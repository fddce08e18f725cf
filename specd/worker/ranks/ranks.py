"""Rank 0's side of a target with followers: every step goes to them, and each rank's result is compared."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol

import mlx.core as mx
import structlog

from specd.step_costs import StepCosts
from specd.v1.ranks_pb2 import Beat, Goodbye, Operation, PlannedFeed, RankMessage, StepAck, StepPlan
from specd.worker.engine.jobs import Feed
from specd.worker.ranks.passes import Compute, Passes
from specd.worker.ranks.watch import Watch

log = structlog.get_logger()

# A step may take this many times as long as such steps usually take.
_PATIENCE = 10


class Follower(Protocol):
    """The connection to a follower."""

    peer: str
    beat: Beat

    def send(self, message: RankMessage) -> None:
        """Send a message. Raises LostRankError."""

    def receive(self, timeout: float | None = None) -> RankMessage:
        """Return the next message that is not a beat. Raises LostRankError."""

    def close(self) -> None:
        """End the connection."""


class _Mirror:
    """The followers' layers of a session, by their handle; see `Mirror` in session_layers.py."""

    def __init__(self, ranks: Ranks, handle: int) -> None:
        self.handle = handle
        self._ranks = ranks
        dropping = weakref.finalize(self, ranks.note, kind=Operation.KIND_DROP, handle=handle)
        dropping.atexit = False

    def rewind(self, position: int) -> None:
        self._ranks.note(kind=Operation.KIND_REWIND, handle=self.handle, position=position)

    def copy(self, position: int) -> _Mirror:
        return self._ranks.copied(self.handle, position)


class Ranks:
    """The followers of this process, which is rank 0.

    It writes down what becomes of each session's layers: begun, copied, rewound, fed, dropped. The next step's plan has
    all of it, so each follower's layers are copies of rank 0's in the same state, with the follower's part of the
    heads. What depends on time, on memory or on chance is decided here alone. `end` ends the process and with it all
    ranks; it is called for every fault, because the ranks may differ after it.
    """

    def __init__(
        self,
        followers: Sequence[Follower],
        watch: Watch,
        *,
        deadline_seconds: float,
        hang_seconds: float,
        end: Callable[[str], None],
    ) -> None:
        """Give a step `deadline_seconds` at least, or `hang_seconds` as long as no costs are known."""
        self.costs: StepCosts | None = None
        self.num_steps = 0
        self._followers = followers
        self._watch = watch
        self._deadline_seconds, self._hang_seconds = deadline_seconds, hang_seconds
        self._end = end
        self._handles = count(1)
        self._noted: list[Operation] = []
        self._lock = threading.Lock()  # layers can be freed on any thread
        self._passes: Passes | None = None

    def attach(self, network: Any) -> None:
        """Run every later pass of a network on all ranks. The followers do not know layers that were made before."""
        self._passes = Passes(network)
        network.make_mirror, network.compute_with_others = self._begun, self.step

    def step(self, feeds: Sequence[Feed], compute: Compute) -> list[mx.array]:
        """Feed each session's tokens on all ranks; return rank 0's logits as `compute` does, evaluated."""
        assert self._passes is not None
        self.num_steps += 1
        seconds = self._deadline_for(feeds)
        with self._watch.within(seconds, f"step {self.num_steps}"):
            try:
                self._send_plan(feeds, seconds)
                rows, own = self._passes.evaluate(feeds, compute)
                acks = [(follower.peer, follower.receive().ack) for follower in self._followers]
            except Exception as error:  # a follower may be fed by now, and this rank not
                self._end(f"step {self.num_steps} failed: {error!r}")
                raise
        for peer, ack in acks:
            self._check(peer, ack, own)
        return rows

    def flush(self) -> None:
        """Tell the followers what was noted since the last step, so that an idle worker frees memory on all ranks."""
        if self._noted:
            self._send_plan((), 0.0)

    def close(self) -> None:
        """Tell the followers that this process stops."""
        self._watch.close()
        for follower in self._followers:
            follower.send(RankMessage(goodbye=Goodbye()))
            follower.close()

    def available_bytes(self, own: int) -> int:
        """Return the least memory that is left on a rank's machine; `own` is left on this one."""
        return min([own, *(each.beat.available_bytes for each in self._followers if each.beat.available_bytes)])

    def note(self, **operation: Any) -> None:
        """Note an operation for the next plan. From any thread."""
        with self._lock:
            self._noted.append(Operation(**operation))

    def copied(self, handle: int, position: int) -> _Mirror:
        """Note a copy of layers, and return its mirror."""
        mirror = _Mirror(self, next(self._handles))
        self.note(kind=Operation.KIND_COPY, handle=mirror.handle, source=handle, position=position)
        return mirror

    def _begun(self) -> _Mirror:
        mirror = _Mirror(self, next(self._handles))
        self.note(kind=Operation.KIND_OPEN, handle=mirror.handle)
        return mirror

    def _send_plan(self, feeds: Sequence[Feed], seconds: float) -> None:
        with self._lock:
            operations, self._noted = self._noted, []
        planned = [
            PlannedFeed(
                handle=feed.cache.layers.mirror.handle,  # type: ignore[union-attr]
                token_ids=feed.token_ids.tolist(),  # type: ignore[arg-type]
                wants_logits=feed.wants_logits,
            )
            for feed in feeds
        ]
        plan = StepPlan(
            step=self.num_steps, operations=operations, feeds=planned, deadline_ms=min(round(1000 * seconds), 2**32 - 1)
        )
        message = RankMessage(plan=plan)
        for follower in self._followers:
            follower.send(message)

    def _deadline_for(self, feeds: Sequence[Feed]) -> float:
        if self.costs is None:
            return self._hang_seconds
        width = sum(feed.num_tokens for feed in feeds) / len(feeds)
        return max(_PATIENCE * self.costs.seconds(len(feeds), width), self._deadline_seconds)

    def _check(self, peer: str, ack: StepAck, own: int) -> None:
        if ack.step != self.num_steps:
            self._end(f"{peer} has answered step {ack.step} in step {self.num_steps}")
        if ack.checksum != own:
            self._end(f"{peer} has other logits in step {self.num_steps}: what connects the ranks changes numbers")

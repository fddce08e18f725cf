"""Rank 0 and a follower in one process, each with a whole network: what they hold must be the same."""

from __future__ import annotations

from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NoReturn

import mlx.core as mx

from specd.v1.ranks_pb2 import Beat, RankMessage, StepAck
from specd.worker.engine.forward import enable_batches
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.model.loader import LoadedModel
from specd.worker.ranks.interpreter import PlanInterpreter
from specd.worker.ranks.ranks import Ranks
from specd.worker.ranks.watch import Watch
from tests.worker.models import small_network, tiny_model


class RanksHaveEndedError(Exception):
    """The process would have ended."""


def end(why: str) -> NoReturn:
    raise RanksHaveEndedError(why)


class InMemoryFollower:
    """The follower's end of a connection: it computes a plan as soon as it is sent."""

    def __init__(self, model: LoadedModel) -> None:
        self.peer, self.beat = "the follower", Beat()
        self.interpreter = PlanInterpreter(model)
        self.num_plans = 0
        self.flips_a_bit = False
        self._answers: SimpleQueue[RankMessage] = SimpleQueue()

    def send(self, message: RankMessage) -> None:
        plan = RankMessage.FromString(message.SerializeToString()).plan
        self.num_plans += 1
        checksum = self.interpreter.run(plan)
        if checksum is not None:
            ack = StepAck(step=plan.step, checksum=checksum ^ self.flips_a_bit)
            self._answers.put(RankMessage(ack=ack))

    def receive(self, timeout: float | None = None) -> RankMessage:
        return self._answers.get(timeout=timeout)

    def close(self) -> None:
        pass


class InMemoryRanks:
    """Rank 0's model, `leader`, and a follower with the same weights."""

    def __init__(self, family: str = "llama", **arguments: Any) -> None:
        networks = [small_network(family, weight_factor=3.0, **arguments) for _ in range(2)]
        models = [replace(tiny_model(), network=each, batches=enable_batches(each)) for each in networks]
        self.leader, held = models
        self.follower = InMemoryFollower(held)
        watch = Watch(1e9, end)
        watch.close()
        self.ranks = Ranks([self.follower], watch, deadline_seconds=60.0, hang_seconds=60.0, end=end)
        self.ranks.attach(self.leader.network)

    def assert_same(self, sessions: list[SessionLayers]) -> None:
        """Compare the follower's layers with those of rank 0's sessions, of which there are no others."""
        self.ranks.flush()
        held = self.follower.interpreter.layers
        handles = [layers.mirror.handle for layers in sessions if layers.mirror is not None]
        assert sorted(held) == sorted(handles)
        for layers, handle in zip(sessions, handles, strict=True):
            assert held[handle].num_fed == layers.num_fed
            own, theirs = (
                [mx.array(rows) for cache in each.caches for rows in cache.rows] for each in (layers, held[handle])
            )
            assert len(own) == len(theirs)
            assert all(mx.array_equal(a, b) for a, b in zip(own, theirs, strict=True))

"""A follower's sessions: an interpreter of the plans of rank 0."""

from __future__ import annotations

import mlx.core as mx

from specd.v1.ranks_pb2 import Operation, StepPlan
from specd.worker.engine.forward import BareCache, forward
from specd.worker.engine.jobs import Feed
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.model.loader import LoadedModel
from specd.worker.ranks.passes import Passes


class PlanInterpreter:
    """The layers of rank 0's sessions, by their handles, with this rank's part of the heads."""

    def __init__(self, model: LoadedModel) -> None:
        """Begin without sessions."""
        self._network = model.network
        self._batches = model.batches
        self._passes = Passes(model.network)
        self.layers: dict[int, SessionLayers] = {}

    def run(self, plan: StepPlan) -> int | None:
        """Apply the operations of a plan, then feed its tokens in one pass.

        Returns the checksum of the pass, or None without feeds. Raises ValueError, or KeyError for an unknown handle,
        if these layers are not in the state of rank 0's.
        """
        for operation in plan.operations:
            self._apply(operation)
        if not plan.feeds:
            return None
        feeds = [
            Feed(
                BareCache(self._network, self.layers[feed.handle], self._batches),
                mx.array([*feed.token_ids], mx.uint32),
                feed.wants_logits,
            )
            for feed in plan.feeds
        ]
        return self._passes.evaluate(feeds, forward)[1]

    def _apply(self, operation: Operation) -> None:
        handle, position = operation.handle, operation.position
        match operation.kind:
            case Operation.KIND_OPEN:
                self.layers[handle] = SessionLayers(self._network)
            case Operation.KIND_COPY:
                self.layers[handle] = self.layers[operation.source].copy(position)
            case Operation.KIND_REWIND:
                layers = self.layers[handle]
                if position > layers.num_fed or layers.rewind(position) != position:
                    raise ValueError(f"session {handle} cannot be rewound to {position}, as it was at rank 0")
            case Operation.KIND_DROP:
                del self.layers[handle]
            case _:
                raise ValueError(f"unknown operation {operation.kind}")

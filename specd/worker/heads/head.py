"""A head: a small network beside a target that drafts from the target's own hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from specd.cache_footprint import CacheFootprint
from specd.worker.heads.hidden import HiddenStates


class Head(Module):
    """A network over pairs of a hidden state h_s of the target and the token x_{s+1} that follows it.

    Its cache holds pair s in row s. Its output for that pair is a state for position s + 1, from which the target's
    output layer makes the logits of x_{s+2}. A chain of drafts continues with this state in the place of h_{s+1}, and
    with the token that was drafted. `layers` are its own layers, for `SessionLayers`. `batches` is whether it computes
    several sessions in one pass, and `footprint` the memory of a session's pairs; the loader sets both.
    """

    def __init__(self, states: HiddenStates) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.states = states
        self.batches = False
        self.footprint = CacheFootprint()

    @property
    def size(self) -> int:
        """The size of a hidden state."""
        return self.states.size

    @property
    def fixed_shapes(self) -> bool:
        """Whether attention reads whole buffers, as in the target (fixed.py)."""
        return self.states.has_fixed_shapes

    def __call__(self, token_ids: mx.array, hidden: mx.array, cache: Sequence[Any]) -> mx.array:
        """Return the head's states [..., size] for pairs of token ids [...] and hidden states [..., size].

        The pairs are [1, n] of one session, or [tokens, 1] of several, with a `BatchLayer` for each of its layers.
        """
        raise NotImplementedError

    def logits(self, states: mx.array) -> mx.array:
        """Return the logits [..., rows] of the head's states [..., size], by the target's output layer."""
        return self.states.logits(states)

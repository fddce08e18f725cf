"""A head: a small network beside a target that drafts from the target's own hidden states."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from specd.cache_footprint import CacheFootprint
from specd.worker.engine.jobs import Feed, Steps
from specd.worker.heads.hidden import HiddenStates
from specd.worker.heads.recent_states import RecentStates
from specd.worker.layers.session_layers import SessionLayers


class HeadCache:
    """A session's state for the head of its target, beside the target's own layers.

    The target holds the session's first tokens; the head reads the target's hidden states of them. Everything that is
    kept is a function of the session's tokens, so a replay makes the same. It is the companion of the target's layers,
    and the engine feeds the head by it. Only jobs may call the methods.
    """

    def __init__(self, head: Head) -> None:
        """Begin without tokens."""
        self.network = head
        self.batches = head.batches
        self.static = self.sharing = None
        self._recent = RecentStates()

    @property
    def end(self) -> int:
        """The position of the first hidden state of the target that the head has not read yet."""
        raise NotImplementedError

    @property
    def most_draft_tokens(self) -> int:
        """The most tokens of a proposal."""
        return self.network.most_draft_tokens

    @property
    def footprint(self) -> CacheFootprint:
        """The memory by the number of tokens."""
        return self.network.footprint

    @property
    def arrays(self) -> Sequence[mx.array]:
        """All arrays."""
        return self._recent.arrays

    def saw(self, rows: mx.array) -> None:
        """Note the hidden states of the target's next n tokens, lazily: the last numbers of its outputs [n, …]."""
        self._recent.add(self.network.fuse(rows[:, -self.network.states.size :]))

    def read(self, token_ids: Sequence[int], position: int) -> Steps[None]:
        """Read the hidden states of the session up to the last one.

        `token_ids` are the session's from `position` on, at most `end` - 1, up to the first without a hidden state.
        """
        raise NotImplementedError

    def first_logits(
        self, target: SessionLayers, token_ids: Sequence[int], position: int, num_draft_tokens: int
    ) -> Steps[mx.array]:
        """Read the hidden states like `read`, and return the logits [1, rows] of the first draft token, lazily.

        `target` has the caches of the target's layers, and at most `num_draft_tokens` draft tokens follow.
        """
        raise NotImplementedError

    def next_logits(self, latest: mx.array) -> Steps[mx.array]:
        """Return the logits [1, rows] of the draft token that follows the latest one [1], lazily."""
        raise NotImplementedError

    def rewind(self, position: int) -> None:
        """Forget all tokens but the first `position`."""
        raise NotImplementedError

    def copy(self, position: int) -> HeadCache:
        """Return an independent one for the first `position` tokens, evaluated."""
        raise NotImplementedError


class Head(Module):
    """A network that drafts from hidden states of a target.

    `size` is the size of a state that it reads, the target's behind `fuse`. `batches` is whether it computes several
    sessions in one pass, and `footprint` the memory that a session keeps for it. The loader sets both, `batches` by a
    trial, unless the kind needs none. A proposal has at most `most_draft_tokens` tokens.
    """

    most_draft_tokens = sys.maxsize

    def __init__(self, states: HiddenStates, size: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.states = states
        self.size = size or states.size
        self.batches = False
        self.footprint = CacheFootprint()

    @property
    def fixed_shapes(self) -> bool:
        """Whether attention reads whole buffers, as in the target (fixed.py)."""
        return self.states.has_fixed_shapes

    def begin(self) -> HeadCache:
        """Begin a session without tokens."""
        raise NotImplementedError

    def measured_footprint(self) -> CacheFootprint:
        """Return the memory that a session keeps, without computation."""
        raise NotImplementedError

    def fuse(self, hidden: mx.array) -> mx.array:
        """Return the states [n, size] that the head reads, of the target's hidden states [n, states.size]."""
        return hidden

    def logits(self, states: mx.array) -> mx.array:
        """Return the logits [..., rows] of the head's own states, by the target's output layer."""
        return self.states.logits(states)

    def compute(self, feeds: Sequence[Feed]) -> list[Any]:
        """Compute the feeds of several sessions, lazily, and return what each feed asks for."""
        raise NotImplementedError


def attach_head(network: Any, head: Head) -> None:
    """Let a network's sessions keep what a head reads."""
    head.footprint = head.measured_footprint()
    head.states.attach()
    network.make_companion = head.begin

"""A session's cache of a block drafter: a row for each state of the target, and the block that is being drafted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import mlx.core as mx

from specd.worker.engine.jobs import Feed, Steps
from specd.worker.heads.dflash.chain import Chain
from specd.worker.heads.head import Head
from specd.worker.heads.head_rows import HeadRows
from specd.worker.layers.session_layers import SessionLayers


class Context(HeadRows):
    """The states of a session in a head's own layers, and the target's last ones, which are not there yet.

    The state of position s is in row s - `begin` of the head's layers, for each s from `begin` up to `end`. It is that
    of one token and those before it, so a rewind leaves the earlier rows valid. Nothing of a drafted block is kept.
    """

    def __init__(
        self,
        head: Head,
        block: Callable[[int, int], mx.array],
        chain: Callable[[mx.array, mx.array], Chain],
    ) -> None:
        """Begin without tokens.

        `block` returns the tokens of a block, by the session's last token and the number of draft tokens. `chain` takes
        the logits [n, own rows] and the states [n, size] that the head computes for them.
        """
        super().__init__(head)
        self._block_of, self._chain_of = block, chain
        self._chain: Chain | None = None  # of the latest block, of which this many tokens have their logits
        self._num_drafted = 0

    @property
    def end(self) -> int:
        """The position of the first hidden state that is not in the head's layers."""
        return self.begin + self.layers.num_fed

    def read(self, token_ids: Sequence[int], position: int) -> Steps[None]:
        """Append the states of the session up to the one before the last of `token_ids`, which begin at `position`."""
        missing = self._missing(position + len(token_ids) - 1)
        if missing.shape[0]:
            yield Feed(self, mx.zeros(missing.shape[0], mx.uint32), wants_logits=False, hidden=missing)

    def first_logits(
        self, target: SessionLayers, token_ids: Sequence[int], position: int, num_draft_tokens: int
    ) -> Steps[mx.array]:
        """Append states as `read` does, compute a block, and return the logits [1, rows] of its first draft token."""
        missing = self._missing(position + len(token_ids) - 1)
        block = self._block_of(token_ids[-1], num_draft_tokens)
        logits, states = yield Feed(self, block, hidden=missing)
        self._chain, self._num_drafted = self._chain_of(logits, states), 1
        return self._chain(0, block[:1])

    def next_logits(self, latest: mx.array) -> Steps[mx.array]:
        """Return the logits [1, rows] of the draft token that follows the latest one [1], lazily."""
        assert self._chain is not None
        self._num_drafted += 1
        return self._chain(self._num_drafted - 1, latest)
        yield

    def rewind(self, position: int) -> None:
        """Forget all tokens but the first `position`. If a window cannot go back that far, it begins again."""
        self._recent.rewind(position)
        self._chain = None
        self._keep(position)

    def copy(self, position: int) -> Context:
        """Return an independent context of the first `position` tokens, evaluated."""
        other = copy(self)
        num_rows = min(self.layers.num_fed, max(position - self.begin, 0))
        is_served = self.layers.can_serve(num_rows) == num_rows
        other.layers = self.layers.copy(num_rows) if is_served else SessionLayers(self.network)
        other._recent, other._chain = self._recent.copy(position), None
        other._keep(position)
        mx.eval(other.arrays)
        return other

    def _missing(self, end: int) -> mx.array:
        """Return the states [n, size] up to position `end` that are not in the head's layers.

        If an earlier one is gone, the context forgets all, and begins with the first state that is kept.
        """
        self._keep(end)
        if self.end < self._recent.first:
            self._keep(0)
            self.begin = self._recent.first
        missing = self._recent.between(self.end, end)
        return missing if missing is not None else mx.zeros((0, self.network.size), self.network.states.dtype)

    def _keep(self, end: int) -> None:
        """Forget the rows from position `end` on."""
        self.layers.rewind(min(max(end - self.begin, 0), self.layers.num_fed))
        if not self.layers.num_fed:
            self.begin = 0

"""A session's state for a head that reads the keys and values of its target: the last hidden states alone."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from weakref import ref

import mlx.core as mx

from specd.worker.engine.jobs import Feed, Steps
from specd.worker.heads.head import Head, HeadCache
from specd.worker.layers.session_layers import SessionLayers


class Reader(HeadCache):
    """The target's last hidden states, up to that of the last token that the target holds.

    A proposal begins with the state of the last token that certainly belongs to the session, the `num_known`-th. The
    target's layers can hold more tokens, which were only proposed: the head must not read their rows.
    """

    def __init__(self, head: Head) -> None:
        """Begin without tokens."""
        super().__init__(head)
        self.num_known = 0
        self._state: mx.array | None = None  # the head's own, at the end of a chain of drafts
        # Weak, because the target's layers refer to this object.
        self._target: ref[SessionLayers] | None = None

    @property
    def layers(self) -> SessionLayers:
        """The target's layers, while the head drafts."""
        layers = self._target() if self._target is not None else None
        assert layers is not None
        return layers

    @property
    def end(self) -> int:
        """The position behind the last hidden state, because the head reads none before it drafts."""
        return self._recent.end

    def saw(self, rows: mx.array) -> None:
        """Note the hidden states of the target's next n tokens, lazily: the last numbers of its outputs [n, …]."""
        super().saw(rows)
        self._state = None  # of a chain that was dropped it would keep the target's rows

    def read(self, token_ids: Sequence[int], position: int) -> Steps[None]:
        """Read nothing."""
        return
        yield

    def first_logits(
        self, target: SessionLayers, token_ids: Sequence[int], position: int, num_draft_tokens: int
    ) -> Steps[mx.array]:
        """Return the logits [1, rows] after the session's tokens, of which `token_ids` begin at `position`, lazily."""
        self.num_known = position + len(token_ids) - 1
        self._target = ref(target)
        state = self._recent.between(self.num_known - 1, self.num_known)
        assert state is not None
        logits = yield from self._feed(mx.array([token_ids[-1]], mx.uint32), state)
        return logits

    def next_logits(self, latest: mx.array) -> Steps[mx.array]:
        """Return the logits [1, rows] of the draft token that follows the latest one [1], lazily."""
        logits = yield from self._feed(latest, self._state)
        return logits

    def _feed(self, token_ids: mx.array, hidden: mx.array | None) -> Steps[mx.array]:
        outputs: tuple[mx.array, mx.array] = yield Feed(self, token_ids, hidden=hidden)
        logits, self._state = outputs
        return logits

    def rewind(self, position: int) -> None:
        """Forget all tokens but the first `position`."""
        self._recent.rewind(position)
        self._state = None

    def copy(self, position: int) -> Reader:
        """Return an independent reader of the first `position` tokens, evaluated."""
        other = copy(self)
        other._recent, other._state = self._recent.copy(position), None
        mx.eval(other.arrays)
        return other

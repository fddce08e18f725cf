"""A session's cache of a head: a row for each pair of a hidden state and the token that follows it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import mlx.core as mx

from specd.cache_footprint import ALL_TOKENS, CacheFootprint
from specd.worker.engine.jobs import Feed, Steps
from specd.worker.heads.head import Head
from specd.worker.heads.head_rows import HeadRows
from specd.worker.heads.recent_states import KEPT
from specd.worker.layers.session_layers import SessionLayers

_Outputs = tuple[mx.array, mx.array]


class Pairs(HeadRows):
    """The pairs of a session in a head's own layers, and the target's last hidden states, from which pairs are made.

    Pair s = (h_s, x_{s+1}) is in row s - `begin` of the head's layers, for each s from `begin` up to `end`, and
    `seconds` has the tokens x_{s+1}. All of it is a function of the session's tokens, so a replay makes the same.
    """

    def __init__(self, head: Head) -> None:
        """Begin without tokens."""
        super().__init__(head)
        self.seconds: list[int] = []
        self._state: mx.array | None = None  # the head's own, at the end of a chain of drafts

    @property
    def end(self) -> int:
        """The position of the first hidden state without a pair in the head's layers."""
        return self.begin + len(self.seconds)

    def missing(self, token_ids: Sequence[int], position: int) -> tuple[list[int], mx.array]:
        """Return the tokens and hidden states [n, size] of the pairs to feed to the head, at least one.

        `token_ids` are the session's from `position` on, up to the first without a hidden state or an earlier one.
        If the hidden state of an earlier pair is gone, the head forgets all pairs, and begins with the first state that
        is kept. Its proposals are then worse until it has seen enough text. The caller feeds the pairs to `layers`, and
        calls `fed`.
        """
        last = position + len(token_ids) - 1  # the second token of the last pair
        same = max(position - 1, 0)
        while same < min(self.end, last - 1) and self.seconds[same - self.begin] == token_ids[same + 1 - position]:
            same += 1
        self._keep(min(same, self.end))
        if self.end < self._recent.first:
            self._keep(0)
            self.begin = self._recent.first
        hidden = self._recent.between(self.end, last)
        assert hidden is not None
        return list(token_ids[self.end + 1 - position :]), hidden

    def fed(self, token_ids: Sequence[int]) -> None:
        """Note the second tokens of the pairs that were fed."""
        self.seconds += token_ids

    def read(self, token_ids: Sequence[int], position: int) -> Steps[None]:
        """Feed the head the missing pairs; `token_ids` and `position` are those of `missing`."""
        yield from self._catch_up(token_ids, position, wants_logits=False)

    def first_logits(
        self, target: SessionLayers, token_ids: Sequence[int], position: int, num_draft_tokens: int
    ) -> Steps[mx.array]:
        """Feed the head the missing pairs, and return the logits [1, rows] after the last one, lazily."""
        logits = yield from self._catch_up(token_ids, position)
        return logits

    def next_logits(self, latest: mx.array) -> Steps[mx.array]:
        """Return the logits [1, rows] of the draft token that follows the latest one [1], lazily."""
        outputs: _Outputs = yield Feed(self, latest, hidden=self._state)
        logits, self._state = outputs
        return logits

    def _catch_up(self, token_ids: Sequence[int], position: int, *, wants_logits: bool = True) -> Steps[mx.array]:
        tokens, hidden = self.missing(token_ids, position)
        outputs: _Outputs = yield Feed(self, mx.array(tokens, mx.uint32), wants_logits, hidden)
        self.fed(tokens)
        logits, self._state = outputs
        return logits

    def rewind(self, position: int) -> None:
        """Forget all tokens but the first `position`. The second token of the last pair may be another one then."""
        self._recent.rewind(position)
        self._keep(min(self.end, position))

    def copy(self, position: int) -> Pairs:
        """Return independent pairs of the first `position` tokens, evaluated."""
        other = copy(self)
        num_pairs = min(len(self.seconds), max(position - self.begin, 0))
        other.layers, other.seconds = self.layers.copy(num_pairs), self.seconds[:num_pairs]
        other._recent, other._state = self._recent.copy(position), None
        mx.eval(other.arrays)
        return other

    def _keep(self, end: int) -> None:
        """Forget the pairs from position `end` on, and those of a chain of drafts, or of a job that was dropped."""
        num_pairs = max(end - self.begin, 0)
        del self.seconds[num_pairs:]
        self.layers.rewind(min(num_pairs, self.layers.num_fed))
        if not num_pairs:
            self.begin = 0


def footprint_of(head: Any) -> CacheFootprint:
    """Return the memory that a session keeps for a head of pairs, without computation."""
    layers = SessionLayers(head)
    states = head(mx.array([[0]]), mx.zeros((1, 1, head.size), head.states.dtype), layers.caches)
    return CacheFootprint.total([layers.footprint, CacheFootprint({KEPT: states.nbytes, ALL_TOKENS: 0})])

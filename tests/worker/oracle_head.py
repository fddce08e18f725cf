"""Heads that propose the target's own continuation, always or with a given probability, for any network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from specd.worker.engine.batch_layer import BatchLayer
from specd.worker.heads.hidden import HiddenStates
from specd.worker.heads.pair_head import PairHead
from specd.worker.layers.session_layers import SessionLayers

_NUM_DRAWS = 4096


class OracleHead(PairHead):
    """Has the interface of a trained head, and its states are the target's own, computed by the target's layers.

    Row s of its cache holds the second token of pair s as a key of one number, so that it rewinds as any head does. A
    pass computes the whole text again. No pair has the text's first token as its second: the head finds it by its
    hidden state, which depends on it alone.

    With the probability 1 - `right`, which each position and token draw once, a state is turned round, so that the
    target's favourite token becomes the least likely one.
    """

    def __init__(self, network: Module, *, right: float = 1.0, seed: int = 0) -> None:
        super().__init__(HiddenStates(network))
        self.layers = [Module()]  # for `SessionLayers`: a cache of full attention
        self._right = right
        self._draws = mx.random.uniform(shape=(_NUM_DRAWS,), key=mx.random.key(seed))
        self._fresh_caches = lambda: SessionLayers(network).caches
        num_rows = self.states.logits(self.states.embed(mx.array([0]))).shape[-1]
        _, first = self.states.run(mx.arange(num_rows)[:, None], [None] * len(network.layers))
        self._first = first[:, 0].astype(mx.float32)  # [tokens, size], of each token at position 0
        mx.eval(self._draws, self._first)

    def __call__(self, token_ids: mx.array, hidden: mx.array, cache: Sequence[Any]) -> mx.array:
        """Return the states [..., size] for pairs of token ids [...] and hidden states [..., size]."""
        (memory,) = cache
        is_batch = isinstance(memory, BatchLayer)
        sessions = memory.caches if is_batch else [memory]
        counts = [span.stop - span.start for span in memory.spans] if is_batch else [token_ids.size]
        shape = (token_ids.size, 1, 1, 1) if is_batch else (1, 1, token_ids.size, 1)
        memory.update_and_fetch(*(row.astype(mx.float32).reshape(shape) for row in (token_ids, self._tokens(hidden))))
        states = [self._states(own.rows, n) for own, n in zip(sessions, counts, strict=True)]
        together = mx.concatenate(states, axis=1)
        return together.swapaxes(0, 1) if is_batch else together

    def _tokens(self, hidden: mx.array) -> mx.array:
        """Return the tokens [...] that have these states [..., size] at position 0."""
        likeness = 2 * hidden.astype(mx.float32) @ self._first.T - mx.sum(self._first**2, axis=-1)
        return mx.argmax(likeness, axis=-1)

    def _states(self, rows: Sequence[mx.array], n: int) -> mx.array:
        """Return the states [1, n, size] of a session's last n pairs."""
        following, own = (row.reshape(-1).astype(mx.uint32) for row in rows)
        text = mx.concatenate([own[:1], following])
        _, states = self.states.run(text[None], self._fresh_caches())
        draws = self._draws[(7919 * mx.arange(text.size) + text) % _NUM_DRAWS]
        return mx.where(draws[None, :, None] < self._right, states, -states)[:, -n:]


def greedy_drafts(head: Any, layers: SessionLayers, token_ids: mx.array, hidden: mx.array, k: int) -> list[int]:
    """Feed pairs [1, n] to a session of a head, draft k tokens behind them, and forget the pairs that were guessed."""
    drafted: list[int] = []
    num_pairs = layers.num_fed + token_ids.shape[1]
    while len(drafted) < k:
        states = head(token_ids, hidden, layers.caches)
        layers.fed(token_ids.shape[1])
        hidden = states[:, -1:]
        token_ids = mx.argmax(head.logits(hidden), axis=-1)
        drafted.append(int(token_ids))
    assert layers.rewind(num_pairs) == num_pairs
    return drafted

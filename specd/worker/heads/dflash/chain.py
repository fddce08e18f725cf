"""The parts of a block drafter that let a drafted token depend on the one before it."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from specd.worker.heads.row_map import never

# Returns the logits [1, rows] of draft token i, lazily, for the token [1] before it.
Chain = Callable[[int, mx.array], mx.array]


class MarkovHead(Module):
    """DSpark's correction of logits by the token before, of low rank."""

    def __init__(self, vocabulary_size: int, num_rows: int, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.markov_w1 = Embedding(vocabulary_size, rank)
        self.markov_w2 = Linear(rank, num_rows, bias=False)

    def chain(self, logits: mx.array) -> Chain:
        """Return a chain over logits [n, rows]."""

        def step(i: int, previous: mx.array) -> mx.array:
            corrected: mx.array = logits[i : i + 1] + self.markov_w2(self.markov_w1(previous))
            return corrected

        return step


class CandidateSelector(Module):
    """DFlash 2's choice among the `top_k` tokens with the largest logits, by the state and by the token before."""

    def __init__(self, size: int, vocabulary_size: int, rank: int, top_k: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._top_k = min(top_k, vocabulary_size)
        self.predecessor_codebook = Embedding(vocabulary_size, rank)
        self.successor_codebook = Embedding(vocabulary_size, rank)
        self.hidden_projection = Linear(size, rank, bias=False)

    def chain(self, logits: mx.array, states: mx.array) -> Chain:
        """Return a chain over logits [n, rows] and states [n, size]. All tokens but the candidates are never chosen."""
        candidates = mx.argpartition(-logits, self._top_k - 1, axis=-1)[:, : self._top_k]
        own = mx.take_along_axis(logits, candidates, axis=-1)
        successors = self.successor_codebook(candidates) * self.hidden_projection(states)[:, None]

        def step(i: int, previous: mx.array) -> mx.array:
            scores = own[i] + successors[i] @ self.predecessor_codebook(previous)[0]
            row = slice(i, i + 1)
            others = never(logits[row, :0], logits.shape[-1])
            return mx.put_along_axis(others, candidates[row], scores[None].astype(logits.dtype), axis=-1)

        return step

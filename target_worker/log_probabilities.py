"""Log-probabilities of emitted tokens, from the logits that decided about them, and of a prompt's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from specd.sampling import RankedToken, TokenLogProbabilities
from specd.worker.engine.jobs import Evaluate, Steps
from specd.worker.sampling.sampler import Sampler


def log_probabilities(
    sampler: Sampler, logits: mx.array, scores: mx.array, token_ids: Sequence[int], top: int
) -> list[TokenLogProbabilities]:
    """Return the log-probabilities of tokens [n], and of the `top` most likely tokens at each of their positions.

    Under the model they are the log softmax of its logits [n, vocabulary_size], under the sampling that of the scores.
    """
    model = np.array(_log_softmax(logits))
    sampled = np.array(
        mx.log(sampler.probabilities(scores))
        if sampler.is_greedy
        else scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    )
    return [
        TokenLogProbabilities(
            float(model[i, token_id]), float(sampled[i, token_id]), _rank(model[i], top), _rank(sampled[i], top)
        )
        for i, token_id in enumerate(token_ids)
    ]


class PromptLogProbabilities:
    """Collects the log-probabilities, under the model, of a prompt's tokens after the first."""

    def __init__(self, top: int) -> None:
        """Also collect the `top` most likely tokens at each position."""
        self.values: list[TokenLogProbabilities] = []
        self._top = top

    def add(self, logits: mx.array, following: Sequence[int]) -> Steps[None]:
        """Add the log-probabilities of tokens [n], from the logits [n, vocabulary_size] before them."""
        if not following:
            return  # MLX's logsumexp fails on an empty array
        rows = _log_softmax(logits)
        yield Evaluate([rows])
        for row, token_id in zip(np.array(rows), following, strict=True):
            self.values.append(TokenLogProbabilities(float(row[token_id]), top_model=_rank(row, self._top)))


def _log_softmax(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _rank(row: NDArray[np.float32], top: int) -> list[RankedToken]:
    """Return the most likely tokens of those with a probability above 0, most likely first, then the lower id first."""
    top = min(top, row.size)
    if top == 0:
        return []
    last = np.partition(row, -top)[-top]
    candidates = np.flatnonzero((row >= last) & (row > -np.inf))  # several tokens can be as likely as the last
    best = candidates[np.lexsort((candidates, -row[candidates]))][:top]
    return [RankedToken(int(i), float(row[i])) for i in best]

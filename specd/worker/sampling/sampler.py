"""The choice of tokens from logits by a session's sampling parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import LogitsProcessor, apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from specd.errors import InternalError
from specd.sampling import Acceptance, Sampling
from specd.worker.sampling.noise import Noise, Purpose

_ALL = 2**31 - 1
_NO_TOKENS: Any = None  # a bias does not read the tokens


class NonFiniteLogitsError(InternalError):
    """A model gave NaN or infinite logits, from which argmax would choose a token without an error."""

    def __init__(self) -> None:
        super().__init__("NON_FINITE_LOGITS", "the model gave logits that are NaN or infinite: check its weights")


class Sampler:
    """The transforms of a session's logits, and the choice of its tokens.

    Rows are positions: the first row of `logits` [n, vocabulary_size] decides about the token at `position`, the next
    about the one after it. Made on any thread, used on the engine's.
    """

    def __init__(self, sampling: Sampling, vocabulary_size: int) -> None:
        self.sampling = sampling
        # The draft must draw as many values as the target, even if its rows are padded differently.
        self.noise = Noise(sampling.seed, sampling.vocabulary_size or vocabulary_size)
        self.is_greedy = sampling.temperature == 0
        self.rejects = sampling.acceptance is Acceptance.REJECTION
        self._size = min(vocabulary_size, sampling.vocabulary_size or vocabulary_size)

    def history(self, cached: Sequence[int], pending: Sequence[int], between: Sequence[int] = ()) -> mx.array | None:
        """Return the tokens for the penalties, or None without penalties.

        These are the tokens before the first row, cached or pending, and the tokens between the first row and the last.
        """
        if not self._penalties:
            return None
        size = self.sampling.penalty_context_size or _ALL
        return mx.array([*[*cached[-size:], *pending][-size:], *between], mx.uint32)

    def scores(self, logits: mx.array, position: int, history: mx.array | None) -> mx.array:
        """Transform logits [n, vocabulary_size] into the log-probabilities that tokens are sampled from.

        They are in float32 and not normalised. With temperature 0 the choice is their maximum.
        """
        return self.truncated(self.transformed(logits, position, history))

    def transformed(
        self, logits: mx.array, position: int, history: mx.array | None, allowed: mx.array | None = None
    ) -> mx.array:
        """Return the log-probabilities [n, vocabulary_size] before the truncations and the temperature.

        They are normalised where a truncation follows. Only tokens that are `allowed` [n, vocabulary_size] can be
        chosen, before all other transforms: others, and suppressed ones, have -inf.
        """
        s = self.sampling
        scores = logits[:, : self._size].astype(mx.float32)
        if allowed is not None:
            scores = mx.where(allowed, scores, -mx.inf)
        for process in self._biases:
            scores = process(_NO_TOKENS, scores)
        if history is not None:
            scores = self._penalise(scores, history)
        suppressed_rows = min(max(s.suppressed_before - position, 0), scores.shape[0])
        if s.suppressed_token_ids and suppressed_rows:
            scores = mx.concatenate(
                [mx.where(self._suppressed, -mx.inf, scores[:suppressed_rows]), scores[suppressed_rows:]]
            )
        if self.is_greedy or not s.truncates:
            return scores
        return scores - mx.logsumexp(scores, axis=-1, keepdims=True)

    def truncated(self, transformed: mx.array) -> mx.array:
        """Return the scores of transformed log-probabilities: without unlikely tokens, over the temperature."""
        if self.is_greedy:
            return transformed
        scores = self._truncate(transformed) if self.sampling.truncates else transformed
        return scores * (1 / self.sampling.temperature)

    def choose(self, scores: mx.array, noise: mx.array | None) -> mx.array:
        """Sample a token [n] from each row of scores, with noise [n, vocabulary_size] (the Gumbel-max trick)."""
        return mx.argmax(scores if noise is None else scores + noise, axis=-1)

    def own_noise(self, position: int, count: int) -> mx.array | None:
        """Return the noise with which the target chooses at `count` positions; None if it chooses greedily."""
        return None if self.is_greedy else self.noise.gumbel(Purpose.SAMPLE, position, count)[:, : self._size]

    def draft_noise(self, position: int, count: int) -> mx.array | None:
        """Return the noise with which the draft chooses: the target's noise, or independent noise under REJECTION."""
        return None if self.is_greedy else self.noise.gumbel(self._draft_purpose, position, count)[:, : self._size]

    def prepare_own_noise(self, position: int, count: int) -> None:
        """Draw the noise for the next `own_noise` while the other worker computes."""
        if not self.is_greedy:
            self.noise.prepare(Purpose.SAMPLE, position, count)

    def prepare_draft_noise(self, position: int, count: int) -> None:
        """Draw the noise for the next `draft_noise` while the other worker computes."""
        if not self.is_greedy:
            self.noise.prepare(self._draft_purpose, position, count)

    def probabilities(self, scores: mx.array) -> mx.array:
        """Return the distributions [n, vocabulary_size] of scores."""
        if self.is_greedy:
            return (mx.arange(scores.shape[-1]) == mx.argmax(scores, axis=-1, keepdims=True)).astype(mx.float32)
        return mx.softmax(scores, axis=-1, precise=True)

    @property
    def _draft_purpose(self) -> Purpose:
        return Purpose.PROPOSE if self.rejects else Purpose.SAMPLE

    def _penalise(self, scores: mx.array, history: mx.array) -> mx.array:
        num_rows = scores.shape[0]
        rows = []
        for i in range(num_rows):
            row = scores[i : i + 1]
            before = history[: history.size - (num_rows - 1 - i)]
            for process in self._penalties:
                row = process(before, row)
            rows.append(row)
        return mx.concatenate(rows)

    def _truncate(self, scores: mx.array) -> mx.array:
        s = self.sampling
        # mlx-lm compiles these again for each value. On a CPU that runs the C++ compiler for a second, while all
        # sessions wait. The results are the same bits without compilation.
        mx.disable_compile()
        try:
            if s.top_p < 1:
                scores = apply_top_p(scores, s.top_p)
            if s.min_p > 0:
                scores = apply_min_p(scores, s.min_p)
            if 0 < s.top_k < self._size:
                scores = apply_top_k(scores, s.top_k)
        finally:
            mx.enable_compile()
        return scores

    # Created at the first use, because arrays belong to the engine's thread.

    @cached_property
    def _biases(self) -> list[LogitsProcessor]:
        return make_logits_processors(logit_bias=dict(self.sampling.logit_bias))

    @cached_property
    def _penalties(self) -> list[LogitsProcessor]:
        s = self.sampling
        size = s.penalty_context_size or _ALL
        return make_logits_processors(
            repetition_penalty=s.repetition_penalty if s.repetition_penalty != 1 else None,
            repetition_context_size=size,
            presence_penalty=s.presence_penalty,
            presence_context_size=size,
            frequency_penalty=s.frequency_penalty,
            frequency_context_size=size,
        )

    @cached_property
    def _suppressed(self) -> mx.array:
        mask = mx.zeros(self._size, mx.bool_)
        mask[mx.array(self.sampling.suppressed_token_ids, mx.uint32)] = True
        return mask


def checksum(values: mx.array) -> mx.array:
    """Return, lazily, the sum of values, which is finite only if all of them are."""
    return mx.sum(values.astype(mx.float32))


def is_finite(sum_of_values: mx.array) -> bool:
    """Return whether all values of a checksum are finite."""
    return math.isfinite(sum_of_values.item())  # type: ignore[arg-type]

"""Attention biases by the distance between two tokens."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
from mlx import nn

from specd.worker.model.t5.arguments import Arguments


class RelativePositions(nn.Module):
    """A bias for each head and distance. Each near distance has its own bias, and farther ones share buckets.

    Buckets grow with the logarithm of the distance up to `max_distance`, with one bucket beyond it (Raffel et al.,
    arXiv 1910.10683, section 2.1). An encoder has half of the buckets for each direction.
    """

    def __init__(self, args: Arguments, *, is_causal: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        num_buckets, max_distance = args.relative_attention_num_buckets, args.relative_attention_max_distance
        self.weight = mx.zeros((num_buckets, args.num_heads))
        self._max_distance = max_distance
        self._is_causal = is_causal
        distances = np.arange(0 if is_causal else -max_distance, max_distance + 1)
        self._buckets = mx.array(buckets(distances, num_buckets, max_distance, is_causal=is_causal))

    def __call__(self, begin: int, num_queries: int, num_keys: int) -> mx.array:
        """Return the biases [1, heads, queries, keys] of the queries from position `begin` on.

        In a decoder, they mask the later keys.
        """
        distances = (begin + mx.arange(num_queries))[:, None] - mx.arange(num_keys)
        least = 0 if self._is_causal else -self._max_distance
        rows = self._buckets[mx.clip(distances, least, self._max_distance) - least]
        biases = self.weight[rows].transpose(2, 0, 1)
        if self._is_causal:
            biases = mx.where(distances >= 0, biases, mx.array(-mx.inf, biases.dtype))
        return biases[None]


def buckets(distances: np.ndarray, num_buckets: int, max_distance: int, *, is_causal: bool) -> np.ndarray:
    """Return the bucket of each distance (query position minus key position)."""
    offset = np.zeros_like(distances)
    if not is_causal:
        num_buckets //= 2
        offset = np.where(distances < 0, num_buckets, 0)
        distances = np.abs(distances)
    distances = np.maximum(distances, 0)
    exact = num_buckets // 2
    with np.errstate(divide="ignore"):
        far = np.log(distances / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    shared = np.minimum(exact + np.where(distances < exact, 0, far).astype(np.int64), num_buckets - 1)
    return offset + np.where(distances < exact, distances, shared)

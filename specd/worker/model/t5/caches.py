"""The two caches of a decoder's layer: for the answer, and for the source."""

from __future__ import annotations

from typing import Any, Self

import mlx.core as mx

from specd.cache_footprint import CacheFootprint
from specd.worker.layers.full import FullCache


class DecoderCache(FullCache):
    """Keys and values of the answer's tokens. The mask is the bias of their distances."""

    def make_mask(self, n: int, *, biases: Any) -> mx.array:  # type: ignore[override]  # only T5's network asks
        """Return the biases for the next n tokens: [1, heads, n, tokens with them]."""
        mask: mx.array = biases(self.offset, n, self.offset + n)
        return mask


class SourceCache:
    """Keys and values [1, heads, source tokens, size] of the source: no token of the answer changes them."""

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def hold(self, keys: mx.array, values: mx.array) -> None:
        """Keep the keys and values of an encoded source."""
        self.keys, self.values = keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the keys and values to which the answer's tokens attend."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def make_mask(self, _: int) -> None:
        """Return no mask, because every token sees the whole source."""

    def serves(self, position: int) -> int:
        return position

    def rewind(self, position: int) -> None:
        """Keep the source, which no rewind changes."""

    def copy(self, _: int) -> Self:
        """Return itself, because it is never written to."""
        return self

    @property
    def footprint(self) -> CacheFootprint:
        """The memory, which the answer's tokens do not change."""
        return CacheFootprint({}, sum(array.nbytes // array.shape[2] for array in self.arrays))

    @property
    def rows(self) -> list[mx.array]:
        return self.arrays

    @property
    def arrays(self) -> list[mx.array]:
        return [array for array in (self.keys, self.values) if array is not None]

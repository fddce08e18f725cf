"""What every kind of layer cache does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from specd.cache_footprint import CacheFootprint


class LayerCache(Protocol):
    """What one layer keeps of a session's first `offset` tokens. To a network it is one of mlx-lm's caches.

    The contract, which tests/worker/test_layer_caches.py holds every kind to: after any feeds, rewinds and copies the
    network computes what it computes on a fresh cache with the same tokens.
    """

    @property
    def offset(self) -> int:
        """The number of tokens that were fed, lazily, since the beginning or a rewind."""

    def serves(self, position: int) -> int:
        """Return the largest position, at most this one, that it can be rewound to, and copied up to."""

    def rewind(self, position: int) -> None:
        """Forget all tokens but the first `position`, which it must serve."""

    def copy(self, position: int) -> LayerCache:
        """Return a cache of the first `position` tokens, evaluated, that what happens to this one does not change."""

    @property
    def footprint(self) -> CacheFootprint:
        """Memory that it takes by the number of tokens; known once a token was fed."""

    @property
    def rows(self) -> Sequence[mx.array]:
        """What it keeps, without room for more."""

    @property
    def arrays(self) -> Sequence[mx.array]:
        """All arrays that it holds; evaluated, they depend on nothing else."""

"""The interface of every kind of layer cache.

To add a kind: write its class, name mlx-lm's class in session_layers.py, and add a network to
tests/worker/test_layer_caches.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from specd.cache_footprint import CacheFootprint


class LayerCache(Protocol):
    """One layer's cache of a session's first `offset` tokens. To a network it is one of mlx-lm's caches.

    The contract, which tests/worker/test_layer_caches.py checks for every kind: after any feeds, rewinds and copies,
    the network computes the same as on a fresh cache with the same tokens.
    """

    @property
    def offset(self) -> int:
        """The number of tokens that were fed, lazily, since the beginning or a rewind."""

    def serves(self, position: int) -> int:
        """Return the largest position, at most `position`, to which the cache can be rewound and copied."""

    def rewind(self, position: int) -> None:
        """Forget all tokens but the first `position`; `serves(position)` must be `position`."""

    def copy(self, position: int) -> LayerCache:
        """Return an independent cache of the first `position` tokens, evaluated."""

    @property
    def footprint(self) -> CacheFootprint:
        """The memory of the cache by its number of tokens; known once a token was fed."""

    @property
    def rows(self) -> Sequence[mx.array]:
        """The kept arrays, without room for more tokens."""

    @property
    def arrays(self) -> Sequence[mx.array]:
        """All arrays that the cache holds; once evaluated, they depend on no others."""

"""The cache of a layer with several caches, such as those of its attention and of its index."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from specd.cache_footprint import CacheFootprint
from specd.worker.layers.kind import LayerCache


class CacheParts(CacheList):
    """Several caches of one layer, which take in the same tokens."""

    caches: tuple[LayerCache, ...]

    def __init__(self, *caches: LayerCache) -> None:
        super().__init__(*caches)  # type: ignore[no-untyped-call]

    @property
    def offset(self) -> int:
        """See LayerCache."""
        return self.caches[0].offset

    def serves(self, position: int) -> int:
        """See LayerCache."""
        return common_position(self.caches, position)

    def rewind(self, position: int) -> None:
        """See LayerCache."""
        for part in self.caches:
            part.rewind(position)

    def copy(self, position: int) -> CacheParts:
        """See LayerCache."""
        return CacheParts(*(part.copy(position) for part in self.caches))

    @property
    def footprint(self) -> CacheFootprint:
        """See LayerCache."""
        return CacheFootprint.total(part.footprint for part in self.caches)

    @property
    def rows(self) -> list[mx.array]:
        """See LayerCache."""
        return [*chain.from_iterable(part.rows for part in self.caches)]

    @property
    def arrays(self) -> list[mx.array]:
        """See LayerCache."""
        return [*chain.from_iterable(part.arrays for part in self.caches)]


def flatten(caches: Iterable[Any]) -> list[Any]:
    """Return caches, with the parts of those that have several in their place."""
    return [part for cache in caches for part in (cache.caches if isinstance(cache, CacheParts) else (cache,))]


def common_position(caches: Iterable[LayerCache], position: int) -> int:
    """Return the largest position, at most this one, that all caches serve."""
    while (served := min(cache.serves(position) for cache in caches)) < position:
        position = served
    return position

"""The cache of a layer with several caches, such as for its attention and its indexer."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from specd.cache_footprint import CacheFootprint
from specd.worker.layers.kind import LayerCache


class CacheParts(CacheList):
    """Several caches of one layer, which hold the same tokens."""

    caches: tuple[LayerCache, ...]

    def __init__(self, *caches: LayerCache) -> None:
        super().__init__(*caches)  # type: ignore[no-untyped-call]

    @property
    def offset(self) -> int:
        return self.caches[0].offset

    def serves(self, position: int) -> int:
        return common_position(self.caches, position)

    def rewind(self, position: int) -> None:
        for part in self.caches:
            part.rewind(position)

    def copy(self, position: int) -> CacheParts:
        return CacheParts(*(part.copy(position) for part in self.caches))

    @property
    def footprint(self) -> CacheFootprint:
        return CacheFootprint.total(part.footprint for part in self.caches)

    @property
    def rows(self) -> list[mx.array]:
        return [*chain.from_iterable(part.rows for part in self.caches)]

    @property
    def arrays(self) -> list[mx.array]:
        return [*chain.from_iterable(part.arrays for part in self.caches)]


def flatten(caches: Iterable[Any]) -> list[Any]:
    """Return the caches, each CacheParts replaced by its parts."""
    return [part for cache in caches for part in (cache.caches if isinstance(cache, CacheParts) else (cache,))]


def common_position(caches: Iterable[LayerCache], position: int) -> int:
    """Return the largest position, at most `position`, that all caches serve."""
    while (served := min(cache.serves(position) for cache in caches)) < position:
        position = served
    return position

"""The caches of all layers of a network, for one session."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import chain
from typing import Any, Protocol, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from specd.cache_footprint import CacheFootprint
from specd.worker.layers.chunk import ChunkCache
from specd.worker.layers.full import FullCache, QuantizedCache
from specd.worker.layers.kind import LayerCache
from specd.worker.layers.parts import CacheParts, common_position, flatten
from specd.worker.layers.recurrent import RecurrentCache
from specd.worker.layers.rows import TokenRows
from specd.worker.layers.snapshots import SnapshotCache, with_snapshots
from specd.worker.layers.window import WindowCache


class RowsOwner(Protocol):
    """Holds the rows of several sessions."""

    def release(self, layers: SessionLayers) -> None:
        """Give a session its rows back, with `take_rows`."""

    def lose(self) -> None:
        """Let all sessions forget their tokens, because a failed pass may have left anything in the rows."""


class Companion(Protocol):
    """State that a session keeps beside the layers of its network, for the same tokens."""

    def rewind(self, position: int) -> None:
        """Forget all tokens but the first `position`."""

    def copy(self, position: int) -> Companion:
        """Return an independent one for the first `position` tokens, evaluated."""

    @property
    def arrays(self) -> Sequence[mx.array]:
        """All arrays that it holds."""

    @property
    def footprint(self) -> CacheFootprint:
        """Its memory by the number of tokens."""


class Mirror(Protocol):
    """The layers of the same session in other processes, which hold parts of the same network.

    The other layers are rewound and copied with these. They are dropped once nothing refers to the mirror.
    """

    handle: int

    def rewind(self, position: int) -> None:
        """Forget all tokens but the first `position` there."""

    def copy(self, position: int) -> Mirror:
        """Return the mirror of a copy of the layers for the first `position` tokens."""


class SessionLayers:
    """The caches of a network's layers, which all hold the session's first `num_fed` tokens.

    It counts tokens itself, because the first cache of some networks does not count. In a network with an encoder, the
    caches also hold the decoder's view of `source`, once `read` has ended. While sessions are computed together, their
    rows can be with an owner, `shared`, until someone asks for the caches. A network that has `make_companion` makes a
    `companion`, such as the cache of a head. One that has `make_mirror` is divided among
    several ranks.
    """

    def __init__(self, network: Module) -> None:
        """Begin empty."""
        self._network = network
        self._caches = _empty(network)
        self.shared: RowsOwner | None = None
        self.companion: Companion | None = getattr(network, "make_companion", lambda: None)()
        self.mirror: Mirror | None = getattr(network, "make_mirror", lambda: None)()
        self.num_fed = 0
        self.source: tuple[int, ...] = ()

    @property
    def caches(self) -> Sequence[LayerCache]:
        """The caches, with the session's rows."""
        if self.shared is not None:
            self.shared.release(self)
        return self._caches

    def give_rows(self, owner: RowsOwner) -> list[tuple[mx.array, mx.array]]:
        """Give the keys and values of all layers away, until they come back; the caches are all of full attention."""
        rows = []
        for cache in cast("Sequence[FullCache]", self.caches):
            rows.append((cache.keys, cache.values))
            cache.keys = cache.values = None
        self.shared = owner
        return rows

    def take_rows(self, rows: Sequence[tuple[mx.array, mx.array]]) -> None:
        """Take the keys and values of all layers back."""
        for cache, (keys, values) in zip(cast("Sequence[FullCache]", self._caches), rows, strict=True):
            cache.keys, cache.values = keys, values

    def advance(self, num_tokens: int) -> None:
        """Count tokens whose rows another object has written."""
        for cache in cast("Sequence[FullCache]", self._caches):
            cache.offset += num_tokens
        self.fed(num_tokens)

    def read(self, source: Sequence[int]) -> Iterator[list[mx.array]]:
        """Let the encoder read a source, and yield the arrays to evaluate next, in many small steps."""
        encoded = None
        for encoded in self._network.encode(mx.array([[*source]])):
            yield [encoded]
        self._network.read(encoded, self.caches)
        self.source = tuple(source)
        yield self.arrays

    def fed(self, num_tokens: int) -> None:
        """Count tokens that were fed to the network."""
        self.num_fed += num_tokens
        for cache in flatten(self._caches):
            if isinstance(cache, SnapshotCache):
                cache.take()

    @property
    def have_states(self) -> bool:
        """Whether a layer has a recurrent state, so that modules that update it must record their arguments."""
        return any(isinstance(part, RecurrentCache) for part in flatten(self._caches))

    def can_serve(self, position: int) -> int:
        """Return the largest position, at most `position`, that `rewind` and `copy` can reach."""
        return common_position(self._caches, position)

    def rewind(self, position: int) -> int:
        """Forget the tokens from `position` on, or more; return the position that it reached.

        The caller feeds the tokens in between again, which makes every kind of cache exact for any rewind.
        """
        reached = self.can_serve(position)
        if reached == self.num_fed:
            return reached
        if reached or self.source:  # the source stays
            for cache in self._caches:
                cache.rewind(reached)
        else:
            self._caches, self.shared = _empty(self._network), None
        if self.companion is not None:
            self.companion.rewind(reached)
        if self.mirror is not None:
            self.mirror.rewind(reached)
        self.num_fed = reached
        return reached

    def copy(self, position: int) -> SessionLayers:
        """Return layers of the first `position` tokens for another session; `can_serve` must allow it."""
        assert self.can_serve(position) == position
        caches = [cache.copy(position) for cache in self.caches]
        layers = copy(self)
        layers._caches = caches
        layers.companion = self.companion and self.companion.copy(position)
        layers.mirror = self.mirror and self.mirror.copy(position)
        layers.num_fed = position
        return layers

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays of all layers."""
        beside = self.companion.arrays if self.companion is not None else ()
        return [*chain.from_iterable(cache.arrays for cache in self.caches), *beside]

    @property
    def last_rows(self) -> list[mx.array]:
        """The rows of the last layer."""
        return list(self.caches[-1].rows)

    @property
    def nbytes(self) -> int:
        """The memory of all arrays, in bytes."""
        return sum({id(array): array.nbytes for array in self.arrays}.values())

    @property
    def footprint(self) -> CacheFootprint:
        """The memory of a session by its tokens; known once a token was fed."""
        beside = [self.companion.footprint] if self.companion is not None else []
        return CacheFootprint.total([*(cache.footprint for cache in self.caches), *beside])


def _empty(network: Module) -> list[LayerCache]:
    caches = [_ours(cache) for cache in make_prompt_cache(network)]
    for part in flatten(caches):
        if isinstance(part, TokenRows):
            part.fixed_shapes = getattr(network, "fixed_shapes", False)
    return caches


def _ours(cache: Any) -> LayerCache:
    """Return our kind of cache for an empty cache that a network made. Caches in a tuple are ours already."""
    if isinstance(cache, tuple):
        return CacheParts(*cache)
    if type(cache) is RotatingKVCache and cache.keep:
        return with_snapshots(cache)
    return _KINDS.get(type(cache), with_snapshots)(cache)


_KINDS: dict[type, Callable[[Any], LayerCache]] = {
    KVCache: lambda _: FullCache(),
    QuantizedKVCache: lambda cache: QuantizedCache(cache.group_size, cache.bits),
    RotatingKVCache: lambda cache: WindowCache(cache.max_size),
    ChunkedKVCache: lambda cache: ChunkCache(cache.chunk_size),
    ArraysCache: lambda cache: RecurrentCache(len(cache.cache)),
    CacheList: lambda cache: CacheParts(*map(_ours, cache.caches)),
}

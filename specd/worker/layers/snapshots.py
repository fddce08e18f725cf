"""Caches of any other class, with snapshots for rewinds."""

from __future__ import annotations

from copy import copy
from functools import cache
from typing import Any, Self

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from specd.cache_footprint import ALL_TOKENS, CacheFootprint
from specd.worker.layers.owned import owned

# The number of passes by which it can be rewound; a rewind beyond them starts from the empty cache.
_MOST_SNAPSHOTS = 4


class SnapshotCache:
    """A mixin for the class of a cache that a network makes.

    It keeps all attributes of the cache after each of the last passes. A rewind into a pass leaves the tokens before
    that pass; the caller feeds the others again.
    """

    offset: int
    snapshots: tuple[tuple[int, dict[str, Any]], ...]

    def take(self) -> None:
        """Keep the attributes after a pass. The first snapshot is the empty cache."""
        vars(self).update(
            tree_map(lambda leaf: owned(leaf) if isinstance(leaf, mx.array) else leaf, self._attributes())
        )
        first, *latest = self.snapshots
        self.snapshots = (first, *latest[1 - _MOST_SNAPSHOTS :], (self.offset, self._attributes()))

    def serves(self, position: int) -> int:
        return max(at for at, _ in self.snapshots if at <= position)

    def rewind(self, position: int) -> None:
        self.snapshots = tuple(each for each in self.snapshots if each[0] <= position)
        vars(self).update({name: _unshared(value) for name, value in self.snapshots[-1][1].items()})

    def copy(self, position: int) -> Self:
        other = copy(self)
        other.rewind(position)
        mx.eval(other.arrays)
        return other

    @property
    def footprint(self) -> CacheFootprint:
        """The memory, under the assumption that all arrays of all snapshots grow with the tokens."""
        size = sum(array.nbytes for array in self.rows)
        return CacheFootprint({ALL_TOKENS: size * (_MOST_SNAPSHOTS + 1) // max(self.offset, 1)})

    @property
    def rows(self) -> list[mx.array]:
        return _arrays(self._attributes())

    @property
    def arrays(self) -> list[mx.array]:
        return _arrays([self._attributes(), *(attributes for _, attributes in self.snapshots)])

    def _attributes(self) -> dict[str, Any]:
        return {name: _unshared(value) for name, value in vars(self).items() if name != "snapshots"}


def with_snapshots(own: Any) -> SnapshotCache:
    """Add snapshots to an empty cache of a network's own class."""
    plain: Any = type(own)
    own.__class__ = _kind(plain)
    own.snapshots = ()
    own.snapshots = ((0, own._attributes()),)
    added: SnapshotCache = own
    return added


@cache
def _kind(plain: Any) -> Any:
    return type(plain.__name__, (SnapshotCache, plain), {})


def _unshared(value: Any) -> Any:
    """Return a value with array objects of its own, because a write to a slice changes the object."""
    return tree_map(lambda leaf: mx.array(leaf) if isinstance(leaf, mx.array) else leaf, value)


def _arrays(tree: Any) -> list[mx.array]:
    named: Any = tree_flatten(tree)
    return [value for _, value in named if isinstance(value, mx.array)]

"""Keys and values of consecutive tokens, in buffers with room for more."""

from __future__ import annotations

from copy import copy
from typing import Any, Self

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from specd.cache_footprint import ALL_TOKENS, CacheFootprint

# The most tokens by which a cache that drops old tokens can be rewound: more than a request feeds with logits, twice,
# because of superseded requests.
SLACK = 128


class TokenRows:
    """The common part of caches that keep keys and values [1, heads, rows, size], a row for each token.

    Row i belongs to position `first` + i, up to position `offset` - 1; the rows behind it are room. Keys are one array,
    or several: packed numbers, scales and biases.
    """

    keys: Any = None
    values: Any = None
    offset: int = 0
    fixed_shapes = False  # whether attention sees whole buffers, of few lengths; see fixed.py
    sees_whole = False  # whether the latest pass did

    @property
    def first(self) -> int:
        """The position of the first row."""
        return 0

    def serves(self, position: int) -> int:
        return position

    def rewind(self, position: int) -> None:
        assert self.serves(position) == position <= self.offset
        self.offset = position

    @property
    def most_tokens(self) -> int:
        """The number of rows beyond which old ones are dropped."""
        return ALL_TOKENS

    @property
    def footprint(self) -> CacheFootprint:
        return CacheFootprint({self.most_tokens: sum(array.nbytes // array.shape[-2] for array in self.arrays)})

    @property
    def rows(self) -> list[mx.array]:
        return _flat(self.between(self.first, self.offset))

    @property
    def arrays(self) -> list[mx.array]:
        return _flat((self.keys, self.values))

    @property
    def length(self) -> int:
        """The number of rows of the buffer."""
        if self.keys is None:
            return 0
        array: mx.array = self.keys if isinstance(self.keys, mx.array) else self.keys[0]
        return array.shape[-2]

    def between(self, begin: int, end: int, *, room: int = 0) -> Any:
        """Return the keys and the values of the positions from `begin` up to `end`, with room for more behind them."""

        def rows(array: mx.array) -> mx.array:
            held = array[..., begin - self.first : end - self.first, :]
            return mx.pad(held, [(0, 0), (0, 0), (0, room), (0, 0)]) if room else held

        return (None, None) if self.keys is None else tree_map(rows, (self.keys, self.values))

    def _copied(self, begin: int, end: int, *, room: int) -> Self:
        """Return a cache of these rows.

        The first written token would copy the whole buffer anyway. And the copy must not be the same `mx.array`: mlx-lm
        writes by assigning to a slice, which changes the object for all of its references.
        """
        cache = copy(self)
        cache.keys, cache.values = self.between(begin, end, room=room)
        cache.offset = end
        mx.eval(cache.arrays)
        return cache


def _flat(keys_and_values: Any) -> list[mx.array]:
    named: Any = tree_flatten(keys_and_values)
    return [array for _, array in named if array is not None]

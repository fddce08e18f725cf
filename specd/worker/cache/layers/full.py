"""The cache of a layer with full attention."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache


class FullCache(KVCache):
    """Keys and values of all tokens: mlx-lm's own cache, whose rewind is a smaller offset."""

    keys: Any
    values: Any

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def serves(self, position: int) -> int:
        """See LayerCache."""
        return position

    def rewind(self, position: int) -> None:
        """See LayerCache."""
        assert 0 <= position <= self.offset
        self.offset = position

    def copy(self, position: int) -> FullCache:
        """See LayerCache.

        The first token that is written would copy the whole buffer anyway. And it must never be the same `mx.array`: an
        assignment to a slice of it, by which mlx-lm writes, changes that object for all who refer to it.
        """
        copy = FullCache()
        copy.keys, copy.values = (
            with_room(array[..., :position, :], self.step - position % self.step) for array in (self.keys, self.values)
        )
        copy.offset = position
        mx.eval(copy.arrays)
        return copy

    @property
    def bytes_per_token(self) -> int:
        """See LayerCache."""
        return sum(array.nbytes // array.shape[-2] for array in self.arrays)

    @property
    def rows(self) -> list[mx.array]:
        """See LayerCache."""
        return [array[..., : self.offset, :] for array in self.arrays]

    @property
    def arrays(self) -> list[mx.array]:
        """See LayerCache."""
        return [] if self.keys is None else [self.keys, self.values]


def with_room(array: mx.array, num_rows: int) -> mx.array:
    """Return rows [batch, heads, length, size] with room for more behind them."""
    return mx.pad(array, [(0, 0), (0, 0), (0, num_rows), (0, 0)])

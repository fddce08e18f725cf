"""The cache of a layer whose attention sees a window of the last tokens."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from specd.worker.cache.layers.full import FullCache, with_room

# Tokens that it can be rewound by: more than a request feeds with logits, twice, for superseded ones.
SLACK = 128


class WindowCache:
    """Keys and values of the last tokens: those in the window, and some more to go back to.

    Rows stand in the order of their positions, and old ones are dropped late, so a rewind is a smaller offset, as with
    full attention. A pass of n tokens sees the last window - 1 + n rows, through a mask that hides from each what is
    out of its window. mlx-lm's RotatingKVCache is a ring, which is wrong after a rewind past its edge
    (ml-explore/mlx-lm#1423); only the order of sums differs from it.

    Invariant: row i of the buffers is of position `_first` + i, up to position `offset` - 1.
    """

    def __init__(self, window: int) -> None:
        """Let each token see itself and the window - 1 before it."""
        self.window = window
        self.offset = 0
        self._first = 0
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values [1, heads, n, size]; return those of what the n tokens see."""
        n = keys.shape[2]
        held = self.offset - self._first
        room = -(-n // FullCache.step) * FullCache.step
        if self._keys is None or self._values is None:
            self._keys, self._values = (
                mx.zeros((*array.shape[:2], room, array.shape[3]), array.dtype) for array in (keys, values)
            )
        elif held + n > self._keys.shape[2]:
            kept = min(held, self.window - 1 + SLACK)
            self._keys, self._values = (
                with_room(array[..., held - kept : held, :], room) for array in (self._keys, self._values)
            )
            self._first += held - kept
            held = kept
        self._keys[..., held : held + n, :] = keys
        self._values[..., held : held + n, :] = values
        self.offset += n
        seen = slice(max(held - (self.window - 1), 0), held + n)
        return self._keys[..., seen, :], self._values[..., seen, :]

    def make_mask(self, n: int, window_size: int | None = None, return_array: bool = False) -> mx.array | str | None:
        """Return the mask for the next n tokens, as mlx-lm's caches do; a model may ask for a smaller window."""
        window = min(window_size or self.window, self.window)
        before = min(self.offset, self.window - 1)
        if before + n > window or (return_array and n > 1):
            if n == 1 and window == self.window:
                return None
            mask: mx.array = create_causal_mask(n, before, window_size=window)
            return mask
        return "causal" if n > 1 else None

    def serves(self, position: int) -> int:
        """See LayerCache."""
        return position if position >= (self._first + self.window - 1 if self._first else 0) else 0

    def rewind(self, position: int) -> None:
        """See LayerCache."""
        assert self.serves(position) == position <= self.offset
        self.offset = position

    def copy(self, position: int) -> WindowCache:
        """See LayerCache. Of the slack, the copy has nothing."""
        assert self.serves(position) == position <= self.offset
        copy = WindowCache(self.window)
        copy.offset, copy._first = position, max(position - (self.window - 1), self._first)
        rows = slice(copy._first - self._first, position - self._first)
        copy._keys, copy._values = (with_room(array[..., rows, :], FullCache.step) for array in self.arrays)
        mx.eval(copy.arrays)
        return copy

    @property
    def bytes_per_token(self) -> int:
        """See LayerCache. Of a window that is not full."""
        return sum(array.nbytes // array.shape[-2] for array in self.arrays)

    @property
    def rows(self) -> list[mx.array]:
        """See LayerCache."""
        return [array[..., : self.offset - self._first, :] for array in self.arrays]

    @property
    def arrays(self) -> list[mx.array]:
        """See LayerCache."""
        return [] if self._keys is None or self._values is None else [self._keys, self._values]

"""The cache of a layer with sliding-window attention."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from specd.worker.layers import rows
from specd.worker.layers.fixed import buffer_length, visible
from specd.worker.layers.full import FullCache
from specd.worker.layers.rows import TokenRows


class WindowCache(TokenRows):
    """Keys and values of the tokens in the window, and of up to `SLACK` older tokens for rewinds.

    Rows are in the order of their positions, and old ones are dropped late, so a rewind is a smaller offset, as with
    full attention. A pass of n tokens sees the last window - 1 + n rows, through a mask that hides from each token the
    rows outside its window. mlx-lm's RotatingKVCache is a ring, which gives wrong tokens after a rewind past its edge
    (ml-explore/mlx-lm#1423). Only the order of sums differs from it.
    """

    def __init__(self, window: int) -> None:
        """Let each token see itself and the window - 1 tokens before it."""
        self.window = window
        self._first = 0
        self._seen = 0  # the first position that the latest pass saw

    @property
    def first(self) -> int:
        return self._first

    @property
    def most_tokens(self) -> int:
        return self.window - 1 + rows.SLACK + FullCache.step

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values [1, heads, n, size]; return the keys and values that the n tokens see."""
        n = keys.shape[2]
        if self.keys is None:
            length = buffer_length(n) if self.fixed_shapes else -(-n // FullCache.step) * FullCache.step
            self.keys, self.values = (
                mx.zeros((*array.shape[:2], length, array.shape[3]), array.dtype) for array in (keys, values)
            )
        else:
            self.make_room(n)
        self._seen = max(self.offset - (self.window - 1), self._first)
        self.sees_whole = self.fixed_shapes and not self._sees_all(n)
        held = self.offset - self._first
        self.keys[..., held : held + n, :] = keys
        self.values[..., held : held + n, :] = values
        self.offset += n
        return self.keys_and_values()

    def make_room(self, n: int) -> None:
        """Let the buffer, which is not empty, hold n more tokens: drop old ones, or lengthen it."""
        held = self.offset - self._first
        if held + n <= self.length:
            return
        held = min(held, self.window - 1 + rows.SLACK)
        length = buffer_length(held + n) if self.fixed_shapes else held - (-n // FullCache.step) * FullCache.step
        self.keys, self.values = self.between(self.offset - held, self.offset, room=length - held)
        self._first = self.offset - held

    def _sees_all(self, n: int) -> bool:
        """Return whether the next n tokens are one that sees all rows. Its kernel needs the rows from the first on."""
        return n == 1 and self.offset < self.window and not self._first

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the result of the latest update, for layers that share it."""
        if self.sees_whole:
            return self.keys, self.values
        seen: tuple[mx.array, mx.array] = self.between(self._seen, self.offset)
        return seen

    def make_mask(self, n: int, window_size: int | None = None, return_array: bool = False) -> mx.array | str | None:
        """Return the mask for the next n tokens, as mlx-lm's caches do; a model may ask for a smaller window."""
        window = min(window_size or self.window, self.window)
        if self.fixed_shapes and not self._sees_all(n):
            if self.keys is not None:
                self.make_room(n)
            return visible(self.offset, n, first=self._first, length=self.length or buffer_length(n), window=window)
        before = min(self.offset, self.window - 1)
        if before + n > window or (return_array and n > 1):
            if n == 1 and window == self.window:
                return None
            mask: mx.array = create_causal_mask(n, before, window_size=window)
            return mask
        return "causal" if n > 1 else None

    def serves(self, position: int) -> int:
        return position if position >= (self._first + self.window - 1 if self._first else 0) else 0

    def copy(self, position: int) -> WindowCache:
        """Return a copy without the slack."""
        begin = max(position - (self.window - 1), self._first)
        held = position - begin
        length = buffer_length(held + 1) if self.fixed_shapes else held + FullCache.step
        copy = self._copied(begin, position, room=length - held)
        copy._first = begin
        return copy

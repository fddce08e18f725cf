"""The cache of a layer with sliding-window attention."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from specd.worker.layers import rows
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
        held = self.offset - self._first
        self._seen = max(self.offset - (self.window - 1), self._first)
        room = -(-n // FullCache.step) * FullCache.step
        if self.keys is None:
            self.keys, self.values = (
                mx.zeros((*array.shape[:2], room, array.shape[3]), array.dtype) for array in (keys, values)
            )
        elif held + n > self.keys.shape[2]:
            held = min(held, self.window - 1 + rows.SLACK)
            self.keys, self.values = self.between(self.offset - held, self.offset, room=room)
            self._first = self.offset - held
        self.keys[..., held : held + n, :] = keys
        self.values[..., held : held + n, :] = values
        self.offset += n
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the result of the latest update, for layers that share it."""
        seen: tuple[mx.array, mx.array] = self.between(self._seen, self.offset)
        return seen

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
        return position if position >= (self._first + self.window - 1 if self._first else 0) else 0

    def copy(self, position: int) -> WindowCache:
        """Return a copy without the slack."""
        begin = max(position - (self.window - 1), self._first)
        copy = self._copied(begin, position, room=FullCache.step)
        copy._first = begin
        return copy

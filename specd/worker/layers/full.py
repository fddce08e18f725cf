"""The caches of layers with full attention: unquantised, and in 8 or 4 bits."""

from __future__ import annotations

from typing import Any, Self

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache

from specd.worker.layers.fixed import buffer_length, visible
from specd.worker.layers.rows import TokenRows


class _AllRows(TokenRows):
    """Rows of all tokens, in front of mlx-lm's class in the order of bases. A copy has room for more.

    With `fixed_shapes`, several tokens get the whole buffer and a mask, and one token gets the rows up to itself.
    """

    step: int

    def copy(self, position: int) -> Self:
        length = buffer_length(position + 1) if self.fixed_shapes else position + self.step - position % self.step
        return self._copied(0, position, room=length - position)

    def make_room(self, n: int) -> None:
        """Let the buffer, which is not empty, hold n more tokens, with `fixed_shapes`."""
        length = buffer_length(self.offset + n)
        if length > self.length:
            self.keys, self.values = self.between(0, self.offset, room=length - self.offset)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Append keys and values [1, heads, n, size]; return what the n tokens see, as the mask expects it."""
        if not self.fixed_shapes:
            return super().update_and_fetch(keys, values)  # type: ignore[misc]
        n = keys.shape[2]
        if self.keys is not None:
            self.make_room(n)
        self.sees_whole = n > 1
        exact = super().update_and_fetch(keys, values)  # type: ignore[misc]
        self.make_room(0)
        return (self.keys, self.values) if self.sees_whole else exact

    def keys_and_values(self) -> Any:
        """Return the result of the latest update, for layers that share it."""
        if self.fixed_shapes and self.sees_whole:
            return self.keys, self.values
        return super().keys_and_values()  # type: ignore[misc]

    def make_mask(self, n: int, window_size: int | None = None, return_array: bool = False) -> mx.array | str | None:
        """Return the mask for the next n tokens, as mlx-lm's caches do."""
        if self.fixed_shapes and n > 1:
            length = max(buffer_length(self.offset + n), self.length)
            return visible(self.offset, n, first=0, length=length, window=window_size)
        options = {"window_size": window_size, "return_array": return_array}
        return super().make_mask(n, **options)  # type: ignore[misc, no-any-return]


class FullCache(_AllRows, KVCache):
    """Keys and values of all tokens: mlx-lm's own cache, whose rewind is a smaller offset."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


class QuantizedCache(_AllRows, QuantizedKVCache):
    """Keys and values of all tokens in 8 or 4 bits: mlx-lm's own quantised cache.

    Each row is quantised by itself, so a pass of several tokens keeps the same values as single passes, except for
    rounding: the last bits of a key depend on the width of a product, and a value on the border of two levels moves by
    a whole level. So where two tokens are nearly as likely, a verify can choose a different one than a decode.
    """

    def __init__(self, group_size: int, bits: int) -> None:
        """Keep `bits` for each number, and a scale and a bias for each `group_size` numbers."""
        super().__init__(group_size, bits)
        self.step = FullCache.step


def quantize_caches(network: Module, *, bits: int, group_size: int) -> None:
    """Make a network create quantised caches for its layers with full attention.

    They are quantised from the first token on. mlx-lm quantises after the first chunk of a prompt, so that its tokens
    depend on the chunks.
    """
    make_plain = getattr(network, "make_cache", lambda: [KVCache() for _ in network.layers])

    def quantized(cache: Any) -> Any:
        if type(cache) is KVCache:
            return QuantizedKVCache(group_size, bits)
        if type(cache) is CacheList:
            return CacheList(*map(quantized, cache.caches))
        return cache

    network.make_cache = lambda: [*map(quantized, make_plain())]

"""The caches of layers with full attention: unquantised, and in 8 or 4 bits."""

from __future__ import annotations

from typing import Any, Self

from mlx.nn.layers.base import Module
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache

from specd.worker.layers.rows import TokenRows


class _AllRows(TokenRows):
    """Rows of all tokens. A copy has room up to the next multiple of `step`."""

    step: int

    def copy(self, position: int) -> Self:
        return self._copied(0, position, room=self.step - position % self.step)


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

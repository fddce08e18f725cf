"""A pass over a few tokens that Python describes once for each shape, under `mx.compile`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from specd.worker.layers.fixed import buffer_length, visible
from specd.worker.layers.full import FullCache
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.layers.window import WindowCache

# The most tokens of a compiled pass: a pending token or a few, and a proposal.
MOST_TOKENS = 64

_Rows = tuple[mx.array, mx.array]


def width_for(num_tokens: int) -> int:
    """Return the number of tokens, a power of two, of the pass that computes this many.

    Weights limit the speed of a pass, so a few tokens more cost little (8.4 to 8.8 ms for 2 to 16 tokens of an 8B model
    on an H200).
    """
    return 1 << (num_tokens - 1).bit_length()


class StaticStep:
    """The compiled pass of a network over a session's next tokens.

    The keys and values of all layers are arguments and results, so that MLX writes the new rows in place, and the
    position is an array, so that one description serves all positions. Buffers have one of a few lengths (fixed.py),
    and the widths of passes are powers of two. The rows of padding are behind the session's tokens: the next pass
    overwrites them. A session's first pass, and passes of many tokens, are mlx-lm's own, padded likewise.
    """

    def __init__(self, network: Module, context_length: int, bytes_per_token: int = 0) -> None:
        """Compile nothing yet: MLX compiles at the first pass of each shape."""
        self._network = network
        self.context_length = context_length
        self.bytes_per_token = bytes_per_token  # of a session's rows in all layers
        self._windows = [getattr(cache, "window", None) for cache in SessionLayers(network).caches]
        self._compiled = mx.compile(self._describe)
        self.compiles_one = True  # whether it also computes single tokens; the loader measures which way is faster

    def of(self, network: Module) -> StaticStep:
        """Return the same for a network with the same caches and other weights, which a compiled pass holds."""
        other = StaticStep(network, self.context_length, self.bytes_per_token)
        other.compiles_one = self.compiles_one
        return other

    @staticmethod
    def suits(network: Module) -> bool:
        """Return whether a network has only caches that it can compute with."""
        return all(type(cache) in (FullCache, WindowCache) for cache in SessionLayers(network).caches)

    def __call__(self, token_ids: mx.array, layers: SessionLayers, *, wants_logits: bool = True) -> mx.array:
        """Feed tokens [n] to a session, lazily, and return the rows [n, …] of the network's outputs after each."""
        n, offset = token_ids.size, layers.num_fed
        width = width_for(n)
        if offset + width > self.context_length:
            width = n  # a table of positions has no rows beyond the context
        padded = mx.pad(token_ids, (0, width - n))
        if offset and width <= MOST_TOKENS and (width > 1 or self.compiles_one):
            logits = self._compute(padded, layers)
        else:
            logits = run(self._network, padded, layers, wants_logits=wants_logits)
            for cache in cast("Sequence[FullCache | WindowCache]", layers.caches):
                cache.offset -= width
        layers.advance(n)
        return logits[:n]

    def _compute(self, token_ids: mx.array, layers: SessionLayers) -> mx.array:
        caches = cast("Sequence[FullCache | WindowCache]", layers.caches)
        rows: list[_Rows] = []
        for cache in caches:
            cache.make_room(token_ids.size)
            rows.append((cache.keys, cache.values))
        firsts = mx.array([cache.first for cache in caches])[:, None]
        logits, kept = self.run(token_ids[None], mx.array([layers.num_fed]), rows, firsts)
        for cache, (keys, values) in zip(caches, kept, strict=True):
            cache.keys, cache.values = keys, values
        return logits[0]

    @property
    def shares(self) -> bool:
        """Whether several sessions can share a pass: windows begin at different rows in each session."""
        return not any(self._windows)

    def run(
        self, token_ids: mx.array, offsets: mx.array, rows: list[_Rows], firsts: mx.array | None = None
    ) -> tuple[mx.array, list[_Rows]]:
        """Feed tokens [sessions, width] at positions `offsets` [sessions], lazily.

        `firsts` [layers, 1] are the positions of the first rows, for windows. Returns the logits [sessions, width,
        rows], and the keys and values [sessions, heads, length, size] of each layer. The caller must drop `rows`
        before these are evaluated, or MLX copies them.
        """
        result: tuple[mx.array, list[_Rows]] = self._compiled(token_ids, offsets, firsts, rows)
        return result

    def rehearse(self, seconds: float) -> None:
        """Compute passes of all widths and lengths of buffers, short ones first, for about this many seconds."""
        ends_at = time.perf_counter() + seconds
        length = 0
        while length < self.context_length:
            length = buffer_length(length + 1)
            for width in (2**i for i in range(MOST_TOKENS.bit_length()) if 2**i + 2 < self.context_length):
                layers = SessionLayers(self._network)
                self(mx.zeros(2, mx.uint32), layers)
                for cache in cast("Sequence[FullCache | WindowCache]", layers.caches):
                    cache.make_room(length - 2)
                mx.eval(self(mx.zeros(width, mx.uint32), layers))
                if time.perf_counter() > ends_at:
                    return

    def _describe(
        self, token_ids: mx.array, offset: mx.array, firsts: mx.array | None, rows: Sequence[_Rows]
    ) -> tuple[mx.array, list[_Rows]]:
        layers = [
            _Layer(keys, values, offset, firsts[i] if firsts is not None and window else 0, window)
            for i, ((keys, values), window) in enumerate(zip(rows, self._windows, strict=True))
        ]
        logits = self._network(token_ids, cache=layers)
        return logits, [(layer.keys, layer.values) for layer in layers]


def run(network: Any, token_ids: mx.array, layers: SessionLayers, *, wants_logits: bool) -> mx.array:
    """Feed tokens [n] to a network with a session's caches, and return the rows [n, …] of its outputs, lazily.

    A network with a head returns hidden states behind the logits, or alone where no logits are wanted: the head reads
    them, and MLX would compute the logits with them.
    """
    if not wants_logits and hasattr(network, "without_logits"):
        network = network.without_logits
    rows: mx.array = network(token_ids[None], cache=layers.caches)
    return rows[0]


class _Layer:
    """A layer's rows within a compiled pass, behind the interface of mlx-lm's caches."""

    def __init__(
        self, keys: mx.array, values: mx.array, offset: mx.array, first: mx.array | int, window: int | None
    ) -> None:
        self.keys, self.values, self.offset = keys, values, offset
        self._first, self._window = first, window

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> _Rows:
        num_sessions, _, n, _ = keys.shape
        begin = self.offset - self._first
        if num_sessions == 1:
            self.keys = mx.slice_update(self.keys, keys, begin, axes=[2])
            self.values = mx.slice_update(self.values, values, begin, axes=[2])
        else:
            own, places = mx.arange(num_sessions)[:, None], begin[:, None] + mx.arange(n)
            self.keys[own, :, places] = keys.swapaxes(1, 2)
            self.values[own, :, places] = values.swapaxes(1, 2)
        self.offset = self.offset + n
        return self.keys, self.values

    def keys_and_values(self) -> _Rows:
        return self.keys, self.values

    def make_mask(self, n: int, window_size: int | None = None, return_array: bool = False) -> mx.array:
        window = min((size for size in (window_size, self._window) if size), default=None)
        offset = self.offset if self.offset.size == 1 else self.offset[:, None, None, None]
        return visible(offset, n, first=self._first, length=self.keys.shape[2], window=window)

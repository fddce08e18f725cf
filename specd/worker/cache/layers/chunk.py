"""The cache of a layer whose attention sees the tokens of its own chunk of the text."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache

from specd.worker.cache.layers import window
from specd.worker.cache.layers.full import FullCache, with_room


class ChunkCache(ChunkedKVCache):
    """mlx-lm's own cache, which drops the tokens of earlier chunks later, so that a rewind is a smaller offset.

    The model asks for the dropping, and hides what is of another chunk.
    """

    keys: Any
    values: Any
    start_position: int

    def __init__(self, chunk_size: int) -> None:
        """Let each token see those before it in its chunk of this many."""
        super().__init__(chunk_size)  # type: ignore[no-untyped-call]
        self.step = FullCache.step

    def maybe_trim_front(self) -> None:
        """Drop tokens of earlier chunks, when they are many."""
        kept = self.chunk_size + window.SLACK
        if self.offset - self.start_position > kept + self.step:
            rows = slice(self.offset - self.start_position - kept, self.offset - self.start_position)
            self.keys, self.values = (array[..., rows, :] for array in (self.keys, self.values))
            self.start_position = self.offset - kept

    def serves(self, position: int) -> int:
        """See LayerCache."""
        begin_of_chunk = position - position % self.chunk_size
        return position if begin_of_chunk >= self.start_position else 0

    def rewind(self, position: int) -> None:
        """See LayerCache."""
        assert self.serves(position) == position <= self.offset
        self.offset = position

    def copy(self, position: int) -> ChunkCache:
        """See LayerCache. Of the slack, the copy has nothing."""
        copy = ChunkCache(self.chunk_size)
        copy.offset, copy.start_position = position, max(position - self.chunk_size, self.start_position)
        rows = slice(copy.start_position - self.start_position, position - self.start_position)
        copy.keys, copy.values = (with_room(array[..., rows, :], self.step) for array in (self.keys, self.values))
        mx.eval(copy.arrays)
        return copy

    @property
    def bytes_per_token(self) -> int:
        """See LayerCache. Of a chunk that is not full."""
        return sum(array.nbytes // array.shape[-2] for array in self.arrays)

    @property
    def rows(self) -> list[mx.array]:
        """See LayerCache."""
        return [array[..., : self.offset - self.start_position, :] for array in self.arrays]

    @property
    def arrays(self) -> list[mx.array]:
        """See LayerCache."""
        return [] if self.keys is None else [self.keys, self.values]

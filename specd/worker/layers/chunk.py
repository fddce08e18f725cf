"""The cache of a layer with chunked attention: a token sees the earlier tokens of its own chunk of the text."""

from __future__ import annotations

from mlx_lm.models.cache import ChunkedKVCache

from specd.worker.layers import rows
from specd.worker.layers.full import FullCache
from specd.worker.layers.rows import TokenRows


class ChunkCache(TokenRows, ChunkedKVCache):
    """mlx-lm's own cache, which drops the tokens of earlier chunks 128 tokens later: a rewind is a smaller offset.

    The model calls `maybe_trim_front`, and masks the tokens of other chunks.
    """

    chunk_size: int
    start_position: int

    def __init__(self, chunk_size: int) -> None:
        """Let each token see the tokens before it in its chunk of `chunk_size` tokens."""
        super().__init__(chunk_size)  # type: ignore[no-untyped-call]
        self.step = FullCache.step

    @property
    def first(self) -> int:
        return self.start_position

    @property
    def most_tokens(self) -> int:
        return self.chunk_size + rows.SLACK + 2 * self.step

    def maybe_trim_front(self) -> None:
        """Drop tokens of earlier chunks once there are many."""
        kept = self.chunk_size + rows.SLACK
        if self.offset - self.start_position > kept + self.step:
            self.keys, self.values = self.between(self.offset - kept, self.offset)
            self.start_position = self.offset - kept

    def serves(self, position: int) -> int:
        begin_of_chunk = position - position % self.chunk_size
        return position if begin_of_chunk >= self.start_position else 0

    def copy(self, position: int) -> ChunkCache:
        begin = max(position - self.chunk_size, self.start_position)
        copy = self._copied(begin, position, room=self.step)
        copy.start_position = begin
        return copy

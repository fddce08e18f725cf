"""The cache of a layer whose attention sees the tokens of its own chunk of the text."""

from __future__ import annotations

from mlx_lm.models.cache import ChunkedKVCache

from specd.worker.layers import rows
from specd.worker.layers.full import FullCache
from specd.worker.layers.rows import TokenRows


class ChunkCache(TokenRows, ChunkedKVCache):
    """mlx-lm's own cache, which drops the tokens of earlier chunks later, so that a rewind is a smaller offset.

    The model asks for the dropping, and hides what is of another chunk.
    """

    chunk_size: int
    start_position: int

    def __init__(self, chunk_size: int) -> None:
        """Let each token see those before it in its chunk of this many."""
        super().__init__(chunk_size)  # type: ignore[no-untyped-call]
        self.step = FullCache.step

    @property
    def first(self) -> int:
        """See TokenRows."""
        return self.start_position

    @property
    def most_tokens(self) -> int:
        """See TokenRows."""
        return self.chunk_size + rows.SLACK + 2 * self.step

    def maybe_trim_front(self) -> None:
        """Drop tokens of earlier chunks, when they are many."""
        kept = self.chunk_size + rows.SLACK
        if self.offset - self.start_position > kept + self.step:
            self.keys, self.values = self.between(self.offset - kept, self.offset)
            self.start_position = self.offset - kept

    def serves(self, position: int) -> int:
        """See LayerCache."""
        begin_of_chunk = position - position % self.chunk_size
        return position if begin_of_chunk >= self.start_position else 0

    def copy(self, position: int) -> ChunkCache:
        """See LayerCache. Of the slack, the copy has nothing."""
        begin = max(position - self.chunk_size, self.start_position)
        copy = self._copied(begin, position, room=self.step)
        copy.start_position = begin
        return copy

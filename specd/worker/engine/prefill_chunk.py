"""The size of the chunks of a prefill."""

from __future__ import annotations

# A multiple that fills vector registers and tiles.
_MULTIPLE = 16
_MOST = 2048


class PrefillChunk:
    """The number of tokens of a prompt that take a given time, learnt from the last chunks.

    Other sessions' rounds wait for a chunk, so its time matters. The number of tokens depends on the model, the device
    and the number of cached tokens.
    """

    def __init__(self, seconds: float, *, has_few_sizes: bool = False) -> None:
        """Aim at chunks that take this long; with `has_few_sizes`, their sizes are powers of two."""
        self._seconds = seconds
        self._has_few_sizes = has_few_sizes  # a GPU plans each size
        self._num_tokens = 2.0 * _MULTIPLE  # short on every device

    @property
    def num_tokens(self) -> int:
        """The number of tokens for the next chunk."""
        num_tokens = int(self._num_tokens) // _MULTIPLE * _MULTIPLE
        return 1 << (num_tokens.bit_length() - 1) if self._has_few_sizes else num_tokens

    def took(self, num_tokens: int, seconds: float) -> None:
        """Learn from a chunk. The next one is at most double and at least half as long: a single time can be wrong."""
        if 2 * num_tokens < self.num_tokens:
            return  # a short rest of a prompt looks slow, because every pass has a fixed cost
        size = self._num_tokens
        # From the unrounded size: with the rounded one it would never reach the next multiple while the fixed cost of a
        # pass is large.
        fitting = size * (num_tokens / self.num_tokens) * self._seconds / max(seconds, 1e-9)
        self._num_tokens = min(max((size + fitting) / 2, _MULTIPLE), 2 * size, _MOST)

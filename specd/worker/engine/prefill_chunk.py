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
        self._growth: dict[int, float] = {}  # how many times as long a chunk of double the size takes
        self._last = (0, 0.0)

    @property
    def num_tokens(self) -> int:
        """The number of tokens for the next chunk."""
        return int(self._num_tokens) // _MULTIPLE * _MULTIPLE

    def took(self, num_tokens: int, seconds: float) -> None:
        """Learn from a chunk. The next one is at most double and at least half as long: a single time can be wrong."""
        if 2 * num_tokens < self.num_tokens:
            return  # a short rest of a prompt looks slow, because every pass has a fixed cost
        if self._has_few_sizes:
            wanted: float = self._wanted_size(1 << (num_tokens - 1).bit_length(), seconds)
        else:
            # From the unrounded size: with the rounded one it would never reach the next multiple while the fixed cost
            # of a pass is large.
            size = self._num_tokens
            fitting = size * (num_tokens / self.num_tokens) * self._seconds / max(seconds, 1e-9)
            wanted = min((size + fitting) / 2, 2 * size)
        self._num_tokens = min(max(wanted, _MULTIPLE), _MOST)

    def _wanted_size(self, size: int, seconds: float) -> int:
        """Return the size after a chunk of this size: half, the same, or double if that is known or unknown to fit.

        Double the tokens take double the time at most, so a growth that a wrong time has shown is forgotten where the
        time allows it. The first chunk of a size teaches nothing, because the device prepares its kernels for it.
        """
        if size not in self._growth:
            self._growth[size] = 1.0
            return size
        before, before_seconds = self._last
        self._last = size, seconds
        if size == 2 * before:
            self._growth[before] = min(seconds / max(before_seconds, 1e-9), 2.0)
        if seconds > self._seconds:
            return size // 2
        return 2 * size if seconds * self._growth[size] <= self._seconds else size

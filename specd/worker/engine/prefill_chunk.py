"""The size of the chunks that prompts are computed in."""

from __future__ import annotations

# Fills vector registers and tiles, and keeps the sizes few, which a GPU compiles or plans one by one.
_MULTIPLE = 16
_MOST = 2048


class PrefillChunk:
    """The number of tokens of a prompt that take a given time, learnt from the last chunks.

    Other sessions' rounds wait for a chunk, so its time matters. The number of tokens for it depends on the model, the
    device and the tokens that are cached already.
    """

    def __init__(self, seconds: float) -> None:
        """Aim at chunks that take this long."""
        self._seconds = seconds
        self._num_tokens = 2.0 * _MULTIPLE  # every device computes these soon

    @property
    def num_tokens(self) -> int:
        """The number of tokens for the next chunk."""
        return int(self._num_tokens) // _MULTIPLE * _MULTIPLE

    def took(self, num_tokens: int, seconds: float) -> None:
        """Learn from a chunk. It at most doubles the next one, or halves it: a single time can be far off."""
        if 2 * num_tokens < self.num_tokens:
            return  # the rest of a prompt looks slow, because every pass has a fixed cost
        size = self._num_tokens
        # Not the rounded size that it had: it would never get over the next multiple while a pass costs much in itself.
        fitting = size * (num_tokens / self.num_tokens) * self._seconds / max(seconds, 1e-9)
        self._num_tokens = min(max((size + fitting) / 2, _MULTIPLE), 2 * size, _MOST)

"""How much of a prompt is computed in one step."""

from __future__ import annotations

# Of whole vector registers and tiles, and not so many sizes that a GPU compiles or plans each anew.
_MULTIPLE = 16
_MOST = 2048


class ChunkSize:
    """As many tokens of a prompt as take a given time, by what the last chunks took.

    Other sessions' rounds wait for a chunk, so its time is what matters, and how many tokens that is depends on the
    model, the device and the length of what is cached already.
    """

    def __init__(self, seconds: float) -> None:
        """Aim at chunks that take so long."""
        self._seconds = seconds
        self._num_tokens = 2.0 * _MULTIPLE  # what every device can do soon

    @property
    def num_tokens(self) -> int:
        """How many tokens the next chunk should have."""
        return int(self._num_tokens) // _MULTIPLE * _MULTIPLE

    def took(self, num_tokens: int, seconds: float) -> None:
        """Learn from a chunk. It at most doubles the next one, or halves it: a single time can be far off."""
        if 2 * num_tokens < self.num_tokens:
            return  # the rest of a prompt, which what every pass costs makes look slow
        size = self._num_tokens
        # Not the rounded size that it had: it would never get over the next multiple while a pass costs much in itself.
        fitting = size * (num_tokens / self.num_tokens) * self._seconds / max(seconds, 1e-9)
        self._num_tokens = min(max((size + fitting) / 2, _MULTIPLE), 2 * size, _MOST)

"""The last hidden states of a target in a session, which wait for its head."""

from __future__ import annotations

import mlx.core as mx

from specd.worker.layers.owned import owned

# The states that are kept: more than a request feeds with logits, twice, because of superseded requests.
KEPT = 128


class RecentStates:
    """The hidden states [n, size] of a session's last positions. The target holds the session's first `end` tokens."""

    def __init__(self) -> None:
        """Begin without tokens."""
        self.end = 0
        self._rows: mx.array | None = None

    @property
    def first(self) -> int:
        """The position of the first state that is kept."""
        return self.end - (self._rows.shape[0] if self._rows is not None else 0)

    def add(self, states: mx.array) -> None:
        """Note the states [n, size] of the target's next n tokens, and forget old ones."""
        self._rows = states if self._rows is None else mx.concatenate([self._rows[-KEPT:], states])
        self.end += states.shape[0]

    def between(self, begin: int, end: int) -> mx.array | None:
        """Return the states of the positions from `begin` up to `end`, or None for no position."""
        if self._rows is None or begin >= end:
            return None
        assert begin >= self.first
        return self._rows[begin - self.first : end - self.first]

    def rewind(self, position: int) -> None:
        """Forget the states from `position` on."""
        self._rows, self.end = self.between(self.first, position), position

    def copy(self, position: int) -> RecentStates:
        """Return the states of the positions before `position`, in memory of their own, lazily."""
        other = RecentStates()
        kept = self.between(self.first, position)
        other.end, other._rows = position, None if kept is None else owned(kept)
        return other

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays."""
        return [] if self._rows is None else [self._rows]

"""A session's cache of a head with layers of its own: a row for each position, and the states that wait for it."""

from __future__ import annotations

import mlx.core as mx

from specd.worker.heads.head import Head, HeadCache
from specd.worker.layers.session_layers import SessionLayers


class HeadRows(HeadCache):
    """Rows in a head's own layers, made from the target's hidden states.

    The row of position s is in row s - `begin` of the layers, for each s from `begin` up to `end`.
    """

    def __init__(self, head: Head) -> None:
        """Begin without tokens."""
        super().__init__(head)
        self.layers = SessionLayers(head)
        self.begin = 0

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays."""
        return [*self.layers.arrays, *self._recent.arrays]

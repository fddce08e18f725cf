"""The rows of a target's logits among those of a head with a vocabulary of its own."""

from __future__ import annotations

import mlx.core as mx

# The logit of tokens that a head never proposes. Sums of it are finite in float32.
_NEVER = -1e30


def never(logits: mx.array, num_rows: int) -> mx.array:
    """Return logits [..., num_rows] of tokens that a head never proposes, like these logits [..., rows]."""
    least = max(_NEVER, mx.finfo(logits.dtype).min)
    return mx.full((*logits.shape[:-1], num_rows), least, logits.dtype)


class RowMap:
    """Puts the logits of a head into the target's rows, by the target's id of each of the head's tokens."""

    def __init__(self, num_rows: int, ids: mx.array) -> None:
        """`num_rows` is the number of the target's rows, and `ids` [own rows] are the target's ids."""
        num_own = ids.size
        self._rows = mx.full(num_rows, num_own, mx.int32)
        self._rows[ids] = mx.arange(num_own, dtype=mx.int32)
        mx.eval(self._rows)

    def __call__(self, logits: mx.array) -> mx.array:
        """Return logits [..., target's rows] of logits [..., own rows]."""
        return mx.take(mx.concatenate([logits, never(logits, 1)], axis=-1), self._rows, axis=-1)

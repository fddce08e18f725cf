"""Arrays that are kept beyond the pass that computed them."""

from __future__ import annotations

import mlx.core as mx

# `mx.contiguous` copies only arrays that waste more than this, in bytes.
_TOLERATED_WASTE = 2**14


def owned(array: mx.array) -> mx.array:
    """Return an array with the same values, lazily, that keeps hardly more memory than its `nbytes`.

    A slice is a view that keeps its whole array in memory: the last three inputs of a chunk of a prompt would keep the
    inputs of the chunk, and a session's rows would keep a whole pass. A large array that has its
    own memory is not copied.
    """
    if array.nbytes >= 4 * _TOLERATED_WASTE:
        return mx.contiguous(array)
    return mx.maximum(array, array)  # always a copy: MLX cannot reuse the memory of an operand that occurs twice

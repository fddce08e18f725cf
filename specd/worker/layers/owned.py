"""Arrays that are kept beyond the pass that computed them."""

from __future__ import annotations

import mlx.core as mx

# `mx.contiguous` copies only what wastes more than this, in bytes.
_TOLERATED_WASTE = 2**14


def owned(array: mx.array) -> mx.array:
    """Return an array with the same values, lazily, that keeps hardly more memory than its `nbytes`.

    A slice is a view: it keeps the whole array that it is of, such as the inputs of a chunk of a prompt for the last
    three of them. What has its memory to itself stays as it is if it is large, so that its copy costs nothing.
    """
    if array.nbytes >= 4 * _TOLERATED_WASTE:
        return mx.contiguous(array)
    return mx.maximum(array, array)  # a copy for sure: MLX cannot write it over an operand that is there twice

"""Attention over whole buffers, so that its shapes stay the same while a session grows.

A GPU prepares a kernel for each shape that it sees first: cuDNN plans attention for 40 to 60 ms (MLX 0.32 on an H200).
With the exact number of keys, each verify has a new shape. A buffer has one of a few lengths, and a mask hides the rows
that a token does not see.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import KVCache

# There are 2 ** (_OCTAVE - 1) buffer lengths between a length and its double, beyond the first few.
_OCTAVE = 3


def buffer_length(num_rows: int) -> int:
    """Return the length of a buffer for this many rows: a multiple of mlx-lm's step, at most a quarter longer."""
    step: int = KVCache.step
    blocks = max(-(-num_rows // step), 1)
    unit = 1 << max((blocks - 1).bit_length() - _OCTAVE, 0)
    return -(-blocks // unit) * unit * step


def visible(offset: int | mx.array, n: int, *, first: int | mx.array, length: int, window: int | None) -> mx.array:
    """Return the mask [n, length] of n tokens from position `offset` on; row i of the buffer has position `first` + i.

    A token sees itself and the tokens before it, at most `window` in all. For several sessions, `offset` and `first`
    are [sessions, 1, 1, 1], and so the mask is [sessions, 1, n, length].
    """
    keys = first + mx.arange(length)
    queries = offset + mx.arange(n)[:, None]
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)

"""Rotary position embedding as one matrix product a layer, where MLX's CPU backend needs a dozen operations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache, partial

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE

from specd.worker.cpu import Undo
from specd.worker.cpu.ops import check_platform

# Each matrix takes 16 KiB, for a head of 64.
_MOST_MATRICES = 32


def replace_rotary(network: Module) -> Iterator[Undo]:
    """Replace the rotary embeddings of a network of mlx-lm that are of the usual, not traditional, kind."""
    check_platform()
    for part in network.modules():
        for name, child in part.children().items():
            if type(child) is RoPE and not child.traditional:
                setattr(part, name, RotaryEmbedding(child.dims, child.traditional, child.base, child.scale))
                yield partial(setattr, part, name, child)


class RotaryEmbedding(RoPE):
    """A RoPE that multiplies a few positions with matrices, which all layers share."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate x [batch, heads, n, size], whose positions begin at an offset, or at one for each of the batch."""
        offsets = (offset,) if isinstance(offset, int) else tuple(np.array(offset).reshape(-1).tolist())
        n, size = x.shape[-2:]
        if len(offsets) * n > _MOST_MATRICES:
            rotated: mx.array = super().__call__(x, offset)  # type: ignore[arg-type]
            return rotated
        matrices = _matrices(self.dims, self.base, self.scale, offsets, n, size)
        return (x.swapaxes(1, 2) @ matrices).swapaxes(1, 2)


@lru_cache(maxsize=8)
def _matrices(dims: int, base: float, scale: float, offsets: tuple[int, ...], n: int, size: int) -> mx.array:
    """Return the rotation of each position as a matrix (Su et al., arXiv 2104.09864, equation 34)."""
    half = dims // 2
    # The frequencies of MLX to the last bit, which a position of some thousands multiplies.
    frequencies = np.array(mx.exp(mx.arange(half, dtype=mx.float32) * (-math.log(base) / half)))
    positions = (np.array(offsets)[:, None] + np.arange(n)).astype(np.float32) * np.float32(scale)
    angles = positions[:, :, None] * frequencies
    matrices = np.zeros((len(offsets), n, size, size), np.float32)
    first = np.arange(half)
    second = first + half
    rest = np.arange(dims, size)
    matrices[:, :, first, first] = matrices[:, :, second, second] = np.cos(angles)
    matrices[:, :, first, second] = np.sin(angles)
    matrices[:, :, second, first] = -np.sin(angles)
    matrices[:, :, rest, rest] = 1
    return mx.array(matrices)

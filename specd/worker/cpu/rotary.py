"""Rotary position embedding as one matrix product a layer, where MLX's CPU backend needs a dozen operations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE

from specd.worker.cpu.ops import check_platform
from specd.worker.cpu.undo import Undo

_Floats = np.ndarray[Any, np.dtype[np.float32]]

# Each matrix takes 16 KiB, for a head of 64.
_MOST_MATRICES = 32


def replace_rotary(network: Module) -> Iterator[Undo]:
    """Replace the rotary embeddings of a network, if they are of the usual kind, not of mlx-lm's "traditional" one."""
    check_platform()
    for part in network.modules():
        for name, child in part.children().items():
            if type(child) is RoPE and not child.traditional:
                setattr(part, name, RotaryEmbedding(child.dims, child.traditional, child.base, child.scale))
                yield partial(setattr, part, name, child)


class RotaryEmbedding(RoPE):
    """A RoPE that shares cosines and sines between layers, and multiplies a few positions with matrices of them."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate x [batch, heads, n, size]; positions begin at one offset, or at an offset for each of the batch."""
        offsets = (offset,) if isinstance(offset, int) else tuple(np.array(offset).reshape(-1).tolist())
        n, size = x.shape[-2:]
        if len(offsets) * n <= _MOST_MATRICES:
            matrices = _matrices(self.dims, self.base, self.scale, offsets, n, size)
            return (x.swapaxes(1, 2) @ matrices).swapaxes(1, 2)
        cos, sin = _rotation(self.dims, self.base, self.scale, offsets, n)
        half = self.dims // 2
        rotated = x[..., : self.dims] * cos + mx.concatenate([x[..., half : self.dims], x[..., :half]], axis=-1) * sin
        return rotated if size == self.dims else mx.concatenate([rotated, x[..., self.dims :]], axis=-1)


# Evaluated arrays, which any thread can use; kept, because all layers use the same.


@lru_cache(maxsize=8)
def _matrices(dims: int, base: float, scale: float, offsets: tuple[int, ...], n: int, size: int) -> mx.array:
    """Return the rotation of each position as a matrix. A product is one operation, the formula needs eight."""
    cos, sin = _angles(dims, base, scale, offsets, n)
    matrices = np.zeros((len(offsets), n, size, size), np.float32)
    first = np.arange(dims // 2)
    second = first + dims // 2
    rest = np.arange(dims, size)
    matrices[:, :, first, first] = matrices[:, :, second, second] = cos
    matrices[:, :, first, second] = sin
    matrices[:, :, second, first] = -sin
    matrices[:, :, rest, rest] = 1
    return mx.array(matrices)


@lru_cache(maxsize=8)
def _rotation(dims: int, base: float, scale: float, offsets: tuple[int, ...], n: int) -> tuple[mx.array, mx.array]:
    """Return cosines and signed sines [offsets, 1, n, dims]. Without the cache they take a twentieth of a prefill."""
    cos, sin = (values[:, None] for values in _angles(dims, base, scale, offsets, n))
    return mx.array(np.concatenate([cos, cos], axis=-1)), mx.array(np.concatenate([-sin, sin], axis=-1))


def _angles(dims: int, base: float, scale: float, offsets: tuple[int, ...], n: int) -> tuple[_Floats, _Floats]:
    """Return cosines and sines [offsets, n, dims / 2] (Su et al., arXiv 2104.09864, equation 34)."""
    positions = (np.array(offsets)[:, None] + np.arange(n)).astype(np.float32) * np.float32(scale)
    angles = positions[:, :, None] * _frequencies(dims, base)
    return np.cos(angles), np.sin(angles)


@lru_cache(maxsize=8)
def _frequencies(dims: int, base: float) -> _Floats:
    # MLX's own to the last bit, because a position of some thousands multiplies any difference.
    half = dims // 2
    return np.array(mx.exp(mx.arange(half, dtype=mx.float32) * (-math.log(base) / half)))

"""RMSNorm in seven operations, where MLX's CPU backend needs eleven."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.normalization import RMSNorm

from specd.worker.cpu.constant import Constant
from specd.worker.cpu.ops import check_platform
from specd.worker.cpu.undo import Undo


def replace_norms(network: Module) -> Iterator[Undo]:
    """Replace the RMSNorms of a network."""
    check_platform()
    for part in network.modules():
        for name, child in part.children().items():
            if type(child) is RMSNorm:
                setattr(part, name, Norm(child))
                yield partial(setattr, part, name, child)


class Norm(RMSNorm):
    """An RMSNorm (Zhang and Sennrich, arXiv 1910.07467, equation 4) by the sum of squares instead of their mean."""

    def __init__(self, plain: RMSNorm) -> None:
        """Compute the same as `plain`."""
        size = len(plain.weight)
        super().__init__(size, plain.eps)
        self.weight = plain.weight
        self._scaled_weight = Constant(math.sqrt(size) * plain.weight)
        self._least_sum = Constant(size * plain.eps)

    def __call__(self, x: mx.array) -> mx.array:
        """Scale x [..., size] to a mean square of 1, times the weight."""
        sums = mx.sum(mx.square(x), axis=-1, keepdims=True)
        return x * mx.rsqrt(sums + self._least_sum.of(sums.shape)) * self._scaled_weight.of(x.shape)

"""Short convolutions of single channels as sums of a few products, which take a fifth of MLX's time.

MLX's CPU backend gathers every window first.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.convolution import Conv1d

from specd.worker.cpu.ops import check_platform
from specd.worker.cpu.undo import Undo


def replace_convolutions(network: Module) -> Iterator[Undo]:
    """Replace the convolutions in front of the states of a network's recurrent layers."""
    check_platform()
    for part in network.modules():
        for name, child in part.children().items():
            if type(child) is Conv1d and _is_short(child):
                setattr(part, name, ShortConvolution(child))
                yield partial(setattr, part, name, child)


def _is_short(plain: Conv1d) -> bool:
    channels, width, per_group = plain.weight.shape
    return per_group == 1 and channels == plain.groups and width <= 8 and (plain.stride, plain.dilation) == (1, 1)


class ShortConvolution(Conv1d):
    """A convolution of a few tokens, with a weight for each channel and place."""

    def __init__(self, plain: Conv1d) -> None:
        """Compute the same as `plain`."""
        channels, width, _ = plain.weight.shape
        super().__init__(channels, channels, width, groups=channels, padding=plain.padding, bias="bias" in plain)
        self.weight = plain.weight
        if "bias" in plain:
            self.bias = plain.bias

    def __call__(self, x: mx.array) -> mx.array:
        """Return [batch, n - width + 1, channels] for x [batch, n, channels], or more with padding."""
        if self.padding:
            x = mx.pad(x, [(0, 0), (self.padding, self.padding), (0, 0)])
        n = x.shape[1] - self.weight.shape[1] + 1
        places = (x[:, i : i + n] * self.weight[:, i, 0] for i in range(self.weight.shape[1]))
        first = next(places) + self.bias if "bias" in self else next(places)
        return sum(places, first)

"""A pass over a step's tokens, evaluated at once, and its checksum, which all ranks compute alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from specd.worker.engine.jobs import Feed

Compute = Callable[[Sequence[Feed]], list[mx.array]]


class Passes:
    """The passes of one network, a part of which this rank holds.

    All ranks evaluate the same arrays in the same order, so that their collectives are in the same order. A pass
    without logits has the last layer's outputs for its checksum, because MLX would compute the logits for theirs. All
    ranks have the same outputs, as each layer ends with a sum over the ranks.
    """

    def __init__(self, network: Module) -> None:
        """Record the outputs of the network's last layer."""
        self._outputs: list[mx.array] = []
        layer: Any = network.layers[-1]
        layer.__class__ = self._recording(type(layer))

    def evaluate(self, feeds: Sequence[Feed], compute: Compute) -> tuple[list[mx.array], int]:
        """Feed each session's tokens, and return the logits as `compute` does, evaluated, and a checksum.

        Without logits, the returned rows stay lazy.
        """
        self._outputs.clear()
        rows = compute(feeds)
        wants_logits = any(feed.wants_logits for feed in feeds)
        total = checksum(rows if wants_logits else self._outputs)
        self._outputs.clear()
        caches = [*chain.from_iterable(feed.cache.layers.arrays for feed in feeds)]
        mx.eval(*(rows if wants_logits else ()), caches, total)
        return rows, int(total.item())  # type: ignore[arg-type]

    def _recording(self, plain: Any) -> Any:
        outputs = self._outputs

        def recorded(layer: Module, *args: Any, **options: Any) -> Any:
            output = plain.__call__(layer, *args, **options)
            outputs.append(output[0] if isinstance(output, tuple) else output)
            return output

        return type(plain.__name__, (plain,), {"__call__": recorded})


def checksum(arrays: Sequence[mx.array]) -> mx.array:
    """Return a checksum of the bits of arrays, lazily, a number of 32 bits. It depends on the order of the values."""
    total = mx.array(0, mx.uint32)
    for array in arrays:
        bits = array.flatten().view(mx.uint32 if array.itemsize == 4 else mx.uint16).astype(mx.uint32)
        total = 31 * total + mx.sum(bits * (2 * mx.arange(bits.size, dtype=mx.uint32) + 1))
    return total

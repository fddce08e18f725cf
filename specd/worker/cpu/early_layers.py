"""Layers whose outputs are computed while Python still describes the next layer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from specd.worker.cpu.undo import Undo, UnsuitableError


def start_layers_early(network: Module) -> Iterator[Undo]:
    """Make a CPU begin with each layer of a network as soon as Python has described it.

    Describing a pass of the embedded target takes Python nearly half of a verify's time.
    """
    layers = getattr(network, "layers", None)
    if not isinstance(layers, list):
        raise UnsuitableError("the network has no list of layers")
    for layer in {id(layer): layer for layer in layers}.values():
        plain: Any = type(layer)
        layer.__class__ = _early(plain)
        yield partial(setattr, layer, "__class__", plain)


@cache
def _early(plain: Any) -> Any:
    """Return a subclass of `plain`, because a network may check the class of its layers."""

    class Early(plain):  # type: ignore[misc]
        def __call__(self, *args: Any, **options: Any) -> Any:
            output = super().__call__(*args, **options)
            if isinstance(output, mx.array):
                mx.async_eval(output)
            return output

    Early.__name__, Early.__qualname__, Early.__module__ = plain.__name__, plain.__qualname__, plain.__module__
    return Early

"""Parts of a model that are under way while Python still describes the next."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module


def start_layers_early(network: Module) -> None:
    """Let a CPU begin with each layer of a network of mlx-lm when it is described, not when all of them are.

    Describing a pass of the embedded target takes Python nearly half of a verify's time. Attention, which comes first
    in a layer, need not even wait for that (a verify takes 4 % less time).
    """
    layers = getattr(network, "layers", None)
    if not isinstance(layers, list):
        return
    for layer in layers:
        if isinstance(layer.get("self_attn"), Module):
            layer.self_attn = EagerLayer(layer.self_attn)
    layers[:] = [EagerLayer(layer) for layer in layers]


class EagerLayer(Module):
    """A layer, or a part of one, whose output is computed at once. Whatever else is asked of it, it answers itself."""

    def __init__(self, layer: Module) -> None:
        """Do as another layer."""
        super().__init__()  # type: ignore[no-untyped-call]
        self["layer"] = layer  # as an attribute, it would be looked for below

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Return what the layer does, under way."""
        output = self.layer(*args, **options)
        if isinstance(output, mx.array):
            mx.async_eval(output)
        return output

    def __getattr__(self, name: str) -> Any:
        """Return what is not here from the layer."""
        return getattr(self["layer"], name) if name not in self else super().__getattr__(name)

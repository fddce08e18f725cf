"""Replacement of functions that the layers of mlx-lm's networks call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from mlx.nn.layers.base import Module

from specd.worker.cpu.undo import Undo


def replace_function(network: Module, name: str, replacement_for: Callable[[Any], Any], *, mark: str) -> list[Undo]:
    """Replace a function in the Python modules of a network's layers, for all networks with these modules.

    `replacement_for` gets the original function. A function with an attribute `mark` is a replacement, and stays.
    """
    undo: list[Undo] = []
    for module in {sys.modules[type(layer).__module__] for layer in network.modules()}:
        plain = getattr(module, name, None)
        if plain is not None and not hasattr(plain, mark):
            replacement = replacement_for(plain)
            setattr(replacement, mark, True)
            setattr(module, name, replacement)
            undo.append(partial(setattr, module, name, plain))
    return undo

"""Where the code of an mlx-lm network looks up the functions that it calls."""

from __future__ import annotations

import sys
from types import ModuleType

from mlx.nn.layers.base import Module


def modules_of(network: Module) -> set[ModuleType]:
    """Return the Python modules that the parts of a network come from; what is replaced there, all of them call."""
    return {sys.modules[type(part).__module__] for part in network.modules()}

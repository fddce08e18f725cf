"""Networks whose attention sees whole buffers, as on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from specd.worker.engine.static_step import StaticStep
from tests.worker.families import make_network
from tests.worker.family_kinds import KINDS

# Kinds of which all caches have rows, so that a pass can be compiled.
STATIC = [name for name in KINDS if StaticStep.suits(make_network(name))]


@contextmanager
def whole_buffers(network: Any, *, compiles: bool = False) -> Iterator[Any]:
    """Let attention see whole buffers; without compilation, which runs the C++ compiler for each shape."""
    network.fixed_shapes = True
    if not compiles:
        mx.disable_compile()
    try:
        yield network
    finally:
        mx.enable_compile()
        network.fixed_shapes = False

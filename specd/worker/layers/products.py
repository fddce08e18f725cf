"""The products of weights in a module that updates a state. Each product is computed once, also across a rewind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from specd.worker.layers.owned import owned

# A linear layer or a convolution, and its output [1, tokens, size].
Product = tuple[Module, mx.array]


@dataclass
class Products:
    """The products in a running call, with `num_tokens` tokens, of a module that updates a state.

    `known` are the products of an earlier call that began with the same tokens and the same state. No output depends on
    later tokens, so their first rows belong to this call too. `made` are this call's own products, in the same order.
    """

    num_tokens: int
    known: Sequence[Product] = ()
    made: list[Product] = field(default_factory=list)


# The products, and the function that computes an unknown output of a linear layer.
_under_way: ContextVar[tuple[Products, Callable[..., mx.array]] | None] = ContextVar("products", default=None)


def plainly(module: Module, function: Callable[..., mx.array], rows: mx.array) -> mx.array:
    """Compute a linear layer's output for one session."""
    return function(module, rows)


@contextmanager
def making(products: Products, compute: Callable[..., mx.array] = plainly) -> Iterator[None]:
    """Make linear layers use the known outputs in `products`, and add there the outputs that they `compute`."""
    token = _under_way.set((products, compute))
    try:
        yield
    finally:
        _under_way.reset(token)
        products.known = ()


def product(module: Module, function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Answer a call of a linear layer."""
    under_way, rows = _under_way.get(), args[0]
    if under_way is None or rows.ndim != 3 or rows.shape[:2] != (1, under_way[0].num_tokens):
        return function(module, *args, **options)
    products, compute = under_way
    return _known_or(products, module, partial(compute, module, function, rows))


def convolution(module: Module, function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Answer a call of a convolution. It also reads a few earlier tokens, so sessions cannot share it."""
    under_way = _under_way.get()
    compute = partial(function, module, *args, **options)
    return compute() if under_way is None else _known_or(under_way[0], module, compute)


def _known_or(products: Products, module: Module, compute: Callable[[], mx.array]) -> mx.array:
    index = len(products.made)
    if index < len(products.known) and products.known[index][0] is module:
        output = products.known[index][1]
        if output.shape[1] > products.num_tokens:
            output = owned(output[:, : products.num_tokens])
    else:
        output = compute()
    if output.shape[:2] == (1, products.num_tokens):
        products.made.append((module, output))
    return output

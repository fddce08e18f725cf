"""The products of weights in a module that updates a state: each is computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

# A linear layer or a convolution, and its output [1, tokens, size].
Product = tuple[Module, mx.array]


@dataclass
class Products:
    """A call under way of a module that updates a state, with this many tokens.

    `known` are the products of an earlier call that began with the same tokens and the same state: no output depends on
    later tokens, so their first rows are those of this call. `made` are this call's own, in the same order. `compute`
    computes a linear layer's output that is not known.
    """

    num_tokens: int
    known: Sequence[Product] = ()
    made: list[Product] = field(default_factory=list)
    compute: Callable[..., mx.array] = lambda module, function, rows: function(module, rows)


_under_way: ContextVar[Products | None] = ContextVar("products", default=None)


@contextmanager
def making(products: Products) -> Iterator[None]:
    """Let linear layers take from `products` what is known, and leave there what they compute."""
    token = _under_way.set(products)
    try:
        yield
    finally:
        _under_way.reset(token)
        products.known = ()


def product(module: Module, function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Answer a call of a linear layer."""
    products, rows = _under_way.get(), args[0]
    if products is None or rows.ndim != 3 or rows.shape[:2] != (1, products.num_tokens):
        return function(module, *args, **options)
    return _known_or(products, module, partial(products.compute, module, function, rows))


def convolution(module: Module, function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Answer a call of a convolution over the tokens and a few before them, of which no session has the same."""
    products = _under_way.get()
    compute = partial(function, module, *args, **options)
    return compute() if products is None else _known_or(products, module, compute)


def _known_or(products: Products, module: Module, compute: Callable[[], mx.array]) -> mx.array:
    index = len(products.made)
    if index < len(products.known) and products.known[index][0] is module:
        output = products.known[index][1][:, : products.num_tokens]
    else:
        output = compute()
    if output.shape[:2] == (1, products.num_tokens):
        products.made.append((module, output))
    return output

"""Linear layers that read the same input, such as those of queries, keys and values, as one product.

A GPU waits for the CPU, which hands it each product of a pass: a product of few tokens takes MLX longer to encode than
the device to compute. Megatron-LM (Shoeybi et al., arXiv 1909.08053) and vLLM merge the same layers.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any

import mlx.core as mx
import structlog
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from specd.worker.engine.forward import agree
from specd.worker.engine.intercept import calling, intercepted

log = structlog.get_logger()

_TURNS = 2


class MergedProduct:
    """The product of an input with the weights of several linear layers, which are its parts.

    The parts stay the network's modules, and their weights become rows of the merged ones. The first part that is
    called with an input computes the product, and the others take their columns of it.
    """

    def __init__(self, parts: Sequence[Module]) -> None:
        """Merge layers for which `_form` is the same."""
        self._parts, self._plain = parts, type(parts[0])
        self._whole: Any = copy.copy(parts[0])
        *self._ends, _ = accumulate(len(part["weight"]) for part in parts)
        for name in _arrays(parts[0]):
            self._whole[name] = mx.concatenate([part[name] for part in parts])
            for part, rows in zip(parts, mx.split(self._whole[name], self._ends), strict=True):
                part[name] = rows
            mx.eval(self._whole[name], [part[name] for part in parts])  # rows of one array, without a copy
        mx.clear_cache()  # has the weights that were merged
        self._input: mx.array | None = None
        self._outputs: dict[int, mx.array] = {}  # of the parts that were not called with this input yet
        for i, part in enumerate(parts):
            part.output = partial(self._output, i)
        self.merge()

    def merge(self) -> None:
        """Let the parts take their outputs from the product."""
        for part in self._parts:
            part.__class__ = _part(self._plain)

    def take_apart(self) -> None:
        """Let each part compute its own product."""
        for part in self._parts:
            part.__class__ = self._plain

    def _output(self, i: int, x: mx.array) -> mx.array:
        """Return the output [..., outputs] of part `i` for an input [..., inputs]."""
        if x is not self._input or i not in self._outputs:
            self._input = x
            self._outputs = dict(enumerate(mx.split(self._whole(x), self._ends, axis=-1)))
        output = self._outputs.pop(i)
        if not self._outputs:
            self._input = None  # it stays in memory no longer than in mlx-lm
        return output


def merge_where_faster(network: Module, logits: Callable[[], mx.array], seconds: Callable[[], float]) -> None:
    """Merge the products of a network, if its logits stay the same and its passes become faster.

    `logits` computes some, lazily, and `seconds` measures a pass. Call it after all replacements of linear layers.
    """
    expected = logits()
    mx.eval(expected)
    products = merge_products(network, logits)
    if not products:
        return
    times: dict[bool, list[float]] = {False: [], True: []}
    try:
        for are_merged, own_times in [*times.items()] * _TURNS:
            for product in products:
                product.merge() if are_merged else product.take_apart()
            own_times.append(seconds())
        is_kept = min(times[True]) < min(times[False]) and agree(logits(), expected)
    except Exception as error:  # models can raise any error on outputs that are parts of a larger array
        log.debug("the model cannot compute with merged products", error=repr(error))
        is_kept = False
    if not is_kept:
        for product in products:
            product.take_apart()
    log.info(
        "tried merged products",
        products=len(products),
        are_kept=is_kept,
        **{"merged" if merged else "apart": round(1000 * min(own), 2) for merged, own in times.items() if own},
    )


def merge_products(network: Module, compute: Callable[[], object]) -> list[MergedProduct]:
    """Merge the linear layers of a network that get the same input, and return their products.

    `compute` describes passes of the network, which show the inputs: no layer is known by its name.
    """
    by_input: dict[int, dict[int, Module]] = defaultdict(dict)
    inputs = []  # so that no other input gets the place of one in memory

    def observe(module: Module, function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        inputs.append(args[0])
        by_input[id(args[0])][id(module)] = module
        return function(module, *args, **options)

    linear = [part for part in network.modules() if type(part) in (Linear, QuantizedLinear)]
    with calling(list({id(part): part for part in linear}.values()), observe):
        compute()
    inputs.clear()  # `observe` lives until the next garbage collection
    products: list[MergedProduct] = []
    seen: set[int] = set()
    for modules in by_input.values():
        products += map(MergedProduct, _alike([module for own, module in modules.items() if own not in seen]))
        seen |= modules.keys()
    return products


def _alike(modules: Sequence[Module]) -> Iterator[list[Module]]:
    """Return the groups of several layers that one product can compute."""
    by_form: dict[Hashable, list[Module]] = defaultdict(list)
    for module in modules:
        by_form[_form(module)].append(module)
    return (parts for parts in by_form.values() if len(parts) > 1)


def _form(module: Module) -> Hashable:
    arrays = [(name, module[name].dtype, module[name].shape[1:]) for name in sorted(_arrays(module))]
    return type(module), *arrays, *(getattr(module, name, None) for name in ("group_size", "bits", "mode"))


def _arrays(module: Module) -> list[str]:
    return [name for name, value in module.items() if isinstance(value, mx.array)]


@cache
def _part(plain: Any) -> Any:
    return intercepted(plain, _call_part)


def _call_part(module: Any, function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    return module.output(*args, **options)

"""The modules of a network that read and write caches, such as attention, and the interception of their calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.convolution import Conv1d
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from specd.worker.cpu.convolution import ShortConvolution
from specd.worker.cpu.packed_linear import PackedLinear
from specd.worker.engine.batch_layer import BatchLayer, Masks
from specd.worker.engine.intercept import calling, intercepted
from specd.worker.engine.lockstep import ask, in_lockstep
from specd.worker.layers.owned import owned
from specd.worker.layers.parts import flatten
from specd.worker.layers.products import Products, convolution, making, plainly, product
from specd.worker.layers.recurrent import MOST_TOKENS, RecurrentCache
from specd.worker.layers.session_layers import SessionLayers


def watch_cache_users(network: Module, *, by_session: bool) -> None:
    """Make the modules that use a cache record their arguments for recurrent states, and compute several sessions.

    They are the innermost modules that get a cache, and one pass over a token finds them: no family of models is known
    by its name. Their class becomes a subclass, since a network may check the class. Modules with a recurrent state
    compute several sessions one by one, and with `by_session` the others do so too.
    """
    candidates = [module for module in network.modules() if module is not network and _takes_cache(type(module))]
    users: dict[int, Module] = {}
    calls: list[tuple[Sequence[Any], list[bool]]] = []  # running calls: their caches, and an item for each inner user

    def observe(module: Module, function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        caches = [arg for arg in (*args, *options.values()) if _is_cache(arg)]
        for outer, inner in calls:
            if any(own is other or own in _recurrent([other]) for own in caches for other in outer):
                inner.append(True)
        has_inner: list[bool] = []
        calls.append((caches, has_inner))
        result = function(module, *args, **options)
        calls.pop()
        if caches and not has_inner:
            users[id(module)] = module
        return result

    with calling(candidates, observe):
        layers = SessionLayers(network)
        mx.eval(network(mx.array([[0]]), cache=layers.caches), layers.arrays)
    for module in users.values():
        plain = getattr(type(module), "unwatched", type(module))
        module.__class__ = _watched(plain, by_session)


def share_products(network: Module) -> None:
    """Compute the products in the modules that `watch_cache_users` found once, linear ones for all sessions.

    Call it after all replacements of linear layers.
    """
    users = [module for module in network.modules() if hasattr(type(module), "unwatched")]
    for part in [part for user in users for part in user.modules()]:
        plain: Any = getattr(type(part), "unshared", type(part))  # a subclass could compute something else
        if plain in (Linear, QuantizedLinear, PackedLinear):
            part.__class__ = _sharing(plain, product)
        elif plain in (Conv1d, ShortConvolution):
            part.__class__ = _sharing(plain, convolution)


def _takes_cache(kind: type) -> bool:
    function = next((vars(base)["__call__"] for base in kind.__mro__ if "__call__" in vars(base)), None)
    return function is not None and "cache" in inspect.signature(function).parameters


def _is_cache(arg: Any) -> bool:
    return hasattr(arg, "rewind") and hasattr(arg, "serves")


def _recurrent(caches: Sequence[Any]) -> list[RecurrentCache]:
    """Return the recurrent states among caches and their parts."""
    return [part for part in flatten(caches) if isinstance(part, RecurrentCache)]


@cache
def _sharing(plain: Any, intercept: Callable[..., Any]) -> Any:
    kind = intercepted(plain, intercept)
    kind.unshared = plain
    return kind


@cache
def _watched(plain: Any, by_session: bool) -> Any:
    kind = intercepted(plain, partial(_call, by_session=by_session))
    kind.unwatched = plain
    return kind


def _call(
    module: Module, function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any], *, by_session: bool
) -> Any:
    """Call a module that uses a cache: record its arguments, and call it for each session alone where necessary."""
    for arg in (*args, *options.values()):
        if isinstance(arg, BatchLayer) and (by_session or _recurrent(arg.caches)):
            return _call_by_session(arg, partial(_call_of_session, module, function), args, options)
    return _call_of_session(module, function, args, options)


def _call_of_session(
    module: Module,
    function: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
    compute: Callable[..., mx.array] = plainly,
) -> Any:
    """Call a module for one session; `compute` computes the products of its linear layers."""
    num_tokens = next((own.shape[1] for own in (*args, *options.values()) if isinstance(own, mx.array)), 0)
    products = Products(num_tokens)
    for recurrent in _recurrent([arg for arg in (*args, *options.values()) if _is_cache(arg)]):
        products = recurrent.record(module, function, args, options, num_tokens)
    with making(products, compute):
        return function(module, *args, **options)


def _call_by_session(
    batch: BatchLayer, call: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Return the outputs for rows [tokens, 1, …] of `call`, made with [1, n, …] for each session.

    Sessions with a few tokens are computed in lockstep. A chunk of a prompt would gain nothing from it. A state keeps
    copies of the session's own rows: a part of an array would keep the tokens of all sessions in memory.
    """
    is_short = [span.stop - span.start <= MOST_TOKENS for span in batch.spans]
    is_kept = bool(_recurrent(batch.caches))
    calls = []
    for i, span in enumerate(batch.spans):
        own = partial(_of_session, batch=batch, i=i, span=span, is_kept=is_kept and is_short[i])
        own_options = {name: own(arg) for name, arg in options.items()}
        compute = (_ask_for_own if is_kept else ask) if is_short[i] else plainly
        calls.append(partial(call, [own(arg) for arg in args], own_options, compute))
    in_step = iter(in_lockstep([each for each, short in zip(calls, is_short, strict=True) if short]))
    return _joined([next(in_step) if short else each() for each, short in zip(calls, is_short, strict=True)])


def _ask_for_own(module: Module, function: Callable[..., mx.array], rows: mx.array) -> mx.array:
    return owned(ask(module, function, rows))


def _of_session(arg: Any, *, batch: BatchLayer, i: int, span: slice, is_kept: bool) -> Any:
    if isinstance(arg, BatchLayer):
        return arg.caches[i]
    if isinstance(arg, Masks):
        return arg.of_sessions[i]
    if isinstance(arg, mx.array) and arg.ndim and arg.shape[0] == batch.spans[-1].stop:
        # The only arrays with one axis are positions. A session gets the position of its first token.
        if arg.ndim == 1:
            return arg[span][:1]
        rows = arg[span].swapaxes(0, 1)
        return owned(rows) if is_kept else rows
    return arg


def _joined(outputs: Sequence[Any]) -> Any:
    if isinstance(outputs[0], mx.array):
        return mx.concatenate([output.swapaxes(0, 1) for output in outputs])
    if isinstance(outputs[0], tuple):
        return tuple(_joined(parts) for parts in zip(*outputs, strict=True))
    return outputs[0]

"""Softmax attention and SiLU in the form that is fastest on MLX's CPU backend.

MLX's wheel for x86 computes value by value. Its exp(), in softmax and SiLU, is a polynomial of six calls to libm and
takes 13 ns, where power() is one call and takes 5 ns. `benchmarks/cpu_steps.py` compares a step with these functions,
and with packed weights, to mlx-lm's.

The formulas are those of MLX, in float32 like everything on the CPU: only the last bits can differ.
"""

from __future__ import annotations

import math
import platform
import sys
from functools import lru_cache, partial, wraps
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from specd.worker.cpu import openblas
from specd.worker.cpu.constant import Constant
from specd.worker.cpu.network import replace_function
from specd.worker.cpu.streams import can_share, spread
from specd.worker.cpu.undo import Undo, UnsuitableError

# With at least this many attention weights, the rows of a session are shared out to the cores.
_WEIGHTS_FOR_ALL_STREAMS = 30_000
# exp(scale) is rounded, which changes the scale; the error is larger for a smaller scale.
_LEAST_EXPONENT = 0.05
# The kept masks, one for each length of a step's sessions, have at most this many values.
_LARGEST_MASK = 65_536

_ONE, _ONE_OVER_E = Constant(1.0), Constant(1 / math.e)


def replace_attention(network: Module) -> list[Undo]:
    """Replace the attention of mlx-lm in the modules of a network."""
    check_platform()
    return replace_function(network, "scaled_dot_product_attention", _attention_for, mark="is_fast")


def replace_swiglu(network: Module) -> list[Undo]:
    """Replace mlx-lm's SiLU times x in the modules of a network."""
    check_platform()
    return replace_function(network, "swiglu", lambda plain: wraps(plain)(partial(swiglu)), mark="is_fast")


def check_platform() -> None:
    """Raise UnsuitableError unless MLX computes value by value here. Apple's vector library has a fast exp()."""
    # Decided by the platform and not by a measurement, so that the last bits are the same after every start.
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise UnsuitableError("this is faster with MLX on x86 Linux only")


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Return silu(gate) * x."""
    shape = gate.shape
    return gate * x / (_ONE.of(shape) + mx.power(_ONE_OVER_E.of(shape), gate))


def _attention_for(plain: Any) -> Any:
    """Return a function that uses `attention` for the calls that it supports, and mlx-lm's for the others."""

    @wraps(plain)
    def scaled_dot_product_attention(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, **options: Any
    ) -> mx.array:
        is_plain = isinstance(keys, mx.array) and all(option is None for option in options.values())
        if is_plain and (mask is None or (isinstance(mask, str) and mask == "causal")):
            return attention(queries, keys, values, scale, is_causal=mask is not None)
        result: mx.array = plain(queries, keys, values, cache=cache, scale=scale, mask=mask, **options)
        return result

    return scaled_dot_product_attention


def attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float, *, is_causal: bool) -> mx.array:
    """Attend from queries [batch, heads, n, size] to keys and values [batch, groups, length, size].

    If it is causal, the queries are at the last n positions. Equals `mx.fast.scaled_dot_product_attention`.
    """
    n, length = queries.shape[2], keys.shape[2]
    if scale < _LEAST_EXPONENT:
        queries, scale = scale * queries, 1.0
    num_weights = queries.shape[1] * n * length
    if n == 1 or num_weights < _WEIGHTS_FOR_ALL_STREAMS or not can_share(n) or not openblas.keeps_to_one_thread():
        return _attend(queries, keys, values, scale, is_causal=is_causal)

    def attend(share: slice) -> mx.array:
        visible = length - n + share.stop if is_causal else length
        return _attend(queries[:, :, share], keys[:, :, :visible], values[:, :, :visible], scale, is_causal=is_causal)

    return spread(n, attend, axis=2)


def _attend(queries: mx.array, keys: mx.array, values: mx.array, scale: float, *, is_causal: bool) -> mx.array:
    batch, heads, n, _ = queries.shape
    groups, length = keys.shape[1:3]
    # The heads of a group share keys, so their queries are one matrix.
    rows = queries.reshape(batch, groups, heads // groups * n, -1)
    keys = keys.swapaxes(-1, -2)
    if not is_causal or n == 1:
        logits = rows @ keys
    elif batch * heads * n * length <= _LARGEST_MASK:
        logits = mx.addmm(_causal_mask(batch, groups, heads // groups, n, length), rows, keys)
    else:
        logits = (rows @ keys).reshape(batch, groups, -1, n, length)
        is_visible = mx.arange(length) <= mx.arange(length - n, length)[:, None]
        logits = mx.where(is_visible, logits, -math.inf).reshape(batch, groups, -1, length)
    weights = mx.power(_exp(scale), logits - mx.max(logits, axis=-1, keepdims=True))
    return ((weights @ values) / mx.sum(weights, axis=-1, keepdims=True)).reshape(batch, heads, n, -1)


# Evaluated arrays, which any thread can use; kept, because all layers use the same.


@lru_cache(maxsize=32)
def _exp(scale: float) -> mx.array:
    return mx.array(math.exp(scale))


@lru_cache(maxsize=64)
def _causal_mask(batch: int, groups: int, heads_of_group: int, n: int, length: int) -> mx.array:
    """Return the mask for the logits of the last n positions, in their shape, so that `addmm` is one operation."""
    mask = np.zeros((batch, groups, heads_of_group, n, length), np.float32)
    mask[..., length - n :] = np.triu(np.full((n, n), -np.inf, np.float32), k=1)
    return mx.array(mask.reshape(batch, groups, heads_of_group * n, length))

"""What a model computes beside its matrix products, in the form that MLX's CPU backend is fastest at.

MLX's wheel for x86 goes value by value. Its exp(), which softmax and SiLU come down to, is a polynomial of six calls to
libm and takes 13 ns, where power() is one call and takes 5 ns. Its RoPE is a dozen operations, which every layer
repeats for the same places, and its RMSNorm is eleven; describing one takes as long as computing it for some
rows. `benchmarks/cpu_steps.py` measures a step with this, and with packed weights, beside
mlx-lm's.

The formulas are those of MLX, in float32 like everything on the CPU: only the last bits can differ.
"""

from __future__ import annotations

import math
import platform
import sys
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models import activations

from specd.worker.blas import keeps_to_one_thread
from specd.worker.constant import Constant
from specd.worker.network import modules_of
from specd.worker.streams import MOST_STREAMS, ROWS_FOR_ALL_STREAMS, can_share, spread

_ONE = Constant(1.0)
_ONE_OVER_E = Constant(1 / math.e)
# Each is 16 KiB to make, for a head of 64.
_MOST_MATRICES = 32
# From so many attention weights on, the rows of a session are shared out to the cores.
_WEIGHTS_FOR_ALL_STREAMS = 30_000
# exp(scale) is rounded, which is an error of the scale, the larger the smaller that is.
_LEAST_EXPONENT = 0.05


def speed_up(network: Module) -> bool:
    """Let a network of mlx-lm, and every one of the same modules, compute with what is below.

    Returns whether it does: only where MLX's exp() is slow. Apple's vector library has a fast one.
    """
    if not _is_exp_slow():
        return False
    for module in modules_of(network):
        if getattr(module, "swiglu", None) is activations.swiglu:
            module.swiglu = swiglu  # type: ignore[attr-defined]
        plain = getattr(module, "scaled_dot_product_attention", None)
        if plain is not None:
            module.scaled_dot_product_attention = _or_else(plain)  # type: ignore[attr-defined]
    for part in network.modules():
        for name, child in part.children().items():
            if type(child) is RoPE and not child.traditional:
                setattr(part, name, RotaryEmbedding(child))
            elif type(child) is RMSNorm:
                setattr(part, name, Norm(child))
    return True


def _is_exp_slow() -> bool:
    # Not measured: which it is decides the last bits, and they should be the same after every start.
    return sys.platform == "linux" and platform.machine() == "x86_64"


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Return silu(gate) * x."""
    shape = gate.shape
    return gate * x / (_ONE.of(shape) + mx.power(_ONE_OVER_E.of(shape), gate))


class Norm(RMSNorm):
    """An RMSNorm (Zhang and Sennrich, arXiv 1910.07467, equation 4) in seven operations, where MLX's has eleven.

    The sum of squares stands for their mean, and the weight for what makes up for it.
    """

    def __init__(self, plain: RMSNorm) -> None:
        """Do as another does."""
        size = len(plain.weight)
        super().__init__(size, plain.eps)
        self.weight = plain.weight
        self._scaled_weight = Constant(math.sqrt(size) * plain.weight)
        self._least_sum = Constant(size * plain.eps)

    def __call__(self, x: mx.array) -> mx.array:
        """Scale x [..., size] to a mean square of 1, times the weight."""
        sums = mx.sum(mx.square(x), axis=-1, keepdims=True)
        return x * mx.rsqrt(sums + self._least_sum.of(sums.shape)) * self._scaled_weight.of(x.shape)


def attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float, *, is_causal: bool) -> mx.array:
    """Attend from queries [batch, heads, n, size] to keys and values [batch, groups, length, size].

    If it is causal, the queries are at the last n places. Returns what `mx.fast.scaled_dot_product_attention` does.
    """
    n, length = queries.shape[2], keys.shape[2]
    if scale < _LEAST_EXPONENT:
        queries, scale = scale * queries, 1.0
    num_weights = queries.shape[1] * n * length
    if n == 1 or num_weights < _WEIGHTS_FOR_ALL_STREAMS or not can_share(n) or not keeps_to_one_thread():
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
    if is_causal and n > 1:
        logits = mx.addmm(_causal_mask(batch, groups, heads // groups, n, length), rows, keys.swapaxes(-1, -2))
    else:
        logits = rows @ keys.swapaxes(-1, -2)
    weights = mx.power(_exp(scale), logits - mx.max(logits, axis=-1, keepdims=True))
    return ((weights @ values) / mx.sum(weights, axis=-1, keepdims=True)).reshape(batch, heads, n, -1)


def _or_else(plain: Any) -> Any:
    """Return `attention` with the signature of mlx-lm's, which is asked for what this one has not."""

    def scaled_dot_product_attention(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, **options: Any
    ) -> mx.array:
        is_plain = isinstance(keys, mx.array) and all(option is None for option in options.values())
        if is_plain and (mask is None or (isinstance(mask, str) and mask == "causal")):
            return attention(queries, keys, values, scale, is_causal=mask is not None)
        result: mx.array = plain(queries, keys, values, cache=cache, scale=scale, mask=mask, **options)
        return result

    return scaled_dot_product_attention


@lru_cache(maxsize=32)
def _exp(scale: float) -> mx.array:
    return mx.array(math.exp(scale))


def _causal_mask(batch: int, groups: int, heads_of_group: int, n: int, length: int) -> mx.array:
    """Return what is added to the logits of the last n places; all layers ask for the same."""
    if n < ROWS_FOR_ALL_STREAMS:
        return _mask_of_few(batch, groups, heads_of_group, n, length)
    return _mask_of_many(1, 1, heads_of_group, n, length)  # repeating it takes less time than memory


def _new_mask(batch: int, groups: int, heads_of_group: int, n: int, length: int) -> mx.array:
    mask = np.zeros((batch, groups, heads_of_group, n, length), np.float32)
    mask[..., length - n :] = np.triu(np.full((n, n), -np.inf, np.float32), k=1)
    return mx.array(mask.reshape(batch, groups, heads_of_group * n, length))


_mask_of_few = lru_cache(maxsize=64)(_new_mask)  # for each session of a step
_mask_of_many = lru_cache(maxsize=MOST_STREAMS)(_new_mask)  # for each share of a prefill's chunk; they are large


class RotaryEmbedding(RoPE):
    """A RoPE of the usual, not traditional, kind that takes what it multiplies with from the layer before."""

    def __init__(self, plain: RoPE) -> None:
        """Do as another does."""
        super().__init__(plain.dims, plain.traditional, plain.base, plain.scale)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate x [batch, heads, n, size], whose places begin at an offset, or at one for each of the batch."""
        offsets = (offset,) if isinstance(offset, int) else tuple(np.array(offset).reshape(-1).tolist())
        n, size = x.shape[-2:]
        if len(offsets) * n <= _MOST_MATRICES:
            matrices = _matrices(self.dims, self.base, self.scale, offsets, n, size)
            return (x.swapaxes(1, 2) @ matrices).swapaxes(1, 2)
        cos, sin = _rotation(self.dims, self.base, self.scale, offsets, n)
        half = self.dims // 2
        rotated = x[..., : self.dims] * cos + mx.concatenate([x[..., half : self.dims], x[..., :half]], axis=-1) * sin
        return rotated if size == self.dims else mx.concatenate([rotated, x[..., self.dims :]], axis=-1)


# Arrays that need no evaluation, which is bound to a thread; kept, because all layers ask for the same.


@lru_cache(maxsize=8)
def _matrices(dims: int, base: float, scale: float, offsets: tuple[int, ...], n: int, size: int) -> mx.array:
    """Return the rotation of each place as a matrix: one product is an operation where the formula is eight."""
    cos, sin = _angles(dims, base, scale, offsets, n)
    matrices = np.zeros((len(offsets), n, size, size), np.float32)
    first = np.arange(dims // 2)
    second = first + dims // 2
    rest = np.arange(dims, size)
    matrices[:, :, first, first] = matrices[:, :, second, second] = cos
    matrices[:, :, first, second] = sin
    matrices[:, :, second, first] = -sin
    matrices[:, :, rest, rest] = 1
    return mx.array(matrices)


@lru_cache(maxsize=8)
def _rotation(dims: int, base: float, scale: float, offsets: tuple[int, ...], n: int) -> tuple[mx.array, mx.array]:
    """Return cosines and signed sines [offsets, 1, n, dims]."""
    cos, sin = (values[:, None] for values in _angles(dims, base, scale, offsets, n))
    return mx.array(np.concatenate([cos, cos], axis=-1)), mx.array(np.concatenate([-sin, sin], axis=-1))


def _angles(
    dims: int, base: float, scale: float, offsets: tuple[int, ...], n: int
) -> tuple[np.ndarray[Any, np.dtype[np.float32]], np.ndarray[Any, np.dtype[np.float32]]]:
    """Return cosines and sines [offsets, n, dims / 2] (Su et al., arXiv 2104.09864, equation 34)."""
    places = (np.array(offsets)[:, None] + np.arange(n)).astype(np.float32) * np.float32(scale)
    angles = places[:, :, None] * _frequencies(dims, base)
    return np.cos(angles), np.sin(angles)


@lru_cache(maxsize=8)
def _frequencies(dims: int, base: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    # MLX's own to the last bit, which a place of some thousands multiplies.
    half = dims // 2
    return np.array(mx.exp(mx.arange(half, dtype=mx.float32) * (-math.log(base) / half)))

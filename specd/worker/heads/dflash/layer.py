"""A layer of a block drafter: a layer of Qwen3 over a block, which also sees the states of a context."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models import qwen3
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.rope_utils import initialize_rope

from specd.worker.engine.batch_layer import Masks
from specd.worker.heads.dflash.config import DFlashConfig

_Mask = mx.array | str | None


class BlockAttention(Module):
    """Attention of a block to the context in a cache, and to the block itself.

    As with mlx-lm's attention, the block's own keys and values are in the cache then: the caller takes them out.
    """

    def __init__(self, args: DFlashConfig, names: Collection[str], *, is_causal: bool) -> None:
        """`names` are those of the layer's tensors."""
        super().__init__()  # type: ignore[no-untyped-call]
        layer = args.layer
        self._num_heads, self._num_kv_heads = layer.num_attention_heads, layer.num_key_value_heads
        self._is_causal = is_causal
        size, own = layer.hidden_size, layer.head_dim * self._num_heads
        has_bias = "self_attn.q_proj.bias" in names
        self.q_proj = Linear(size, own, bias=has_bias)
        self.k_proj = Linear(size, layer.head_dim * self._num_kv_heads, bias=has_bias)
        self.v_proj = Linear(size, layer.head_dim * self._num_kv_heads, bias=has_bias)
        self.o_proj = Linear(own, size, bias="self_attn.o_proj.bias" in names)
        self.q_norm = RMSNorm(layer.head_dim, layer.rms_norm_eps)
        self.k_norm = RMSNorm(layer.head_dim, layer.rms_norm_eps)
        if "self_attn.attention_sink_bias" in names:
            self.attention_sink_bias = mx.zeros(self._num_heads)
        self._scale = layer.head_dim**-0.5
        self._rotate = initialize_rope(
            layer.head_dim,
            layer.rope_theta,
            args.has_interleaved_angles,
            layer.rope_scaling,
            layer.max_position_embeddings,
        )

    def append(self, states: mx.array, cache: Any) -> None:
        """Append the keys and values of a context's next states [1, n, size] to a session's cache, lazily."""
        cache.update_and_fetch(*self._keys_and_values(states, cache))

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        """Return the output for the tokens of a block [1, n, size], or of several [tokens, 1, size]."""
        mask: Any = self._seen(cache.make_mask(x.shape[1]))
        keys, values = self._keys_and_values(x, cache)
        queries = self._rotate(self.q_norm(_by_head(self.q_proj(x), self._num_heads)), offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
        sinks = self.attention_sink_bias if "attention_sink_bias" in self else None
        output = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self._scale, mask=mask, sinks=sinks
        )
        projected: mx.array = self.o_proj(output.swapaxes(1, 2).reshape(*x.shape[:2], -1))
        return projected

    def _keys_and_values(self, x: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        keys = self.k_norm(_by_head(self.k_proj(x), self._num_kv_heads))
        return self._rotate(keys, offset=cache.offset), _by_head(self.v_proj(x), self._num_kv_heads)

    def _seen(self, mask: _Mask | Masks) -> _Mask | Masks:
        """Return a causal mask, as caches make it, without causality where the layer has none.

        A token then sees the whole block, as the last token does, and its own window of the context.
        """
        if self._is_causal:
            return mask
        if isinstance(mask, Masks):
            return Masks([_without_causality(each) for each in mask.of_sessions])
        return _without_causality(mask)


class GroupedConv(Module):
    """DFlash 2's convolution of a block before and behind another part of a layer.

    Kernels are `base_kernel` and a part that depends on the input, one for each group of numbers. A token sees the
    tokens before it, in its own block only.
    """

    def __init__(self, size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._group_size = group_size
        self.base_kernel = mx.zeros((2, kernel_size, size))
        self.kernel_projection = Linear(size, 2 * kernel_size * size // group_size, bias=False)

    def __call__(self, part: Callable[[mx.array], mx.array], x: mx.array, places: mx.array) -> mx.array:
        """Return the output of a part of a layer; `places` [tokens] are the places of x's tokens in their blocks."""
        _, kernel_size, size = self.base_kernel.shape
        own = self.kernel_projection(x).reshape(-1, 2, kernel_size, size // self._group_size, 1)
        kernels = self.base_kernel.reshape(2, kernel_size, -1, self._group_size) + own
        return _convolved(part(_convolved(x, kernels[:, 0], places)), kernels[:, 1], places)


class BlockLayer(Module):
    """A layer over the tokens of one block [1, n, size], or of several [tokens, 1, size] with a `BatchLayer`."""

    def __init__(self, args: DFlashConfig, names: Collection[str], *, is_causal: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        size, eps = args.layer.hidden_size, args.layer.rms_norm_eps
        self.self_attn = BlockAttention(args, names, is_causal=is_causal)
        self.mlp = qwen3.MLP(size, args.layer.intermediate_size)
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        if args.conv_kernel_size:
            self.attention_conv = GroupedConv(size, args.conv_kernel_size, args.conv_group_size)
            self.mlp_conv = GroupedConv(size, args.conv_kernel_size, args.conv_group_size)

    def __call__(self, x: mx.array, places: mx.array, cache: Any) -> mx.array:
        """Return the layer's output; `places` [tokens] are the places of the tokens in their blocks."""

        def attend(normed: mx.array) -> mx.array:
            return self.self_attn(normed, cache)

        if "attention_conv" not in self:
            x = x + attend(self.input_layernorm(x))
            unconvolved: mx.array = x + self.mlp(self.post_attention_layernorm(x))
            return unconvolved
        x = x + self.attention_conv(attend, self.input_layernorm(x), places)
        return x + self.mlp_conv(self.mlp, self.post_attention_layernorm(x), places)


def _by_head(rows: mx.array, num_heads: int) -> mx.array:
    return rows.reshape(*rows.shape[:2], num_heads, -1).swapaxes(1, 2)


def _without_causality(mask: _Mask) -> _Mask:
    return mask | mask[-1:] if isinstance(mask, mx.array) else None


def _convolved(x: mx.array, kernels: mx.array, places: mx.array) -> mx.array:
    """Convolve tokens in their blocks, with kernels [tokens, kernel size, groups, group size]."""
    rows = x.reshape(-1, *kernels.shape[2:])
    output = kernels[:, 0] * rows
    for i in range(1, kernels.shape[1]):
        earlier = mx.pad(rows, [(i, 0), (0, 0), (0, 0)])[: rows.shape[0]]
        output = output + kernels[:, i] * mx.where(places[:, None, None] >= i, earlier, 0)
    return output.reshape(x.shape)

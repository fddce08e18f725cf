"""The names of a T5's weights."""

from __future__ import annotations

import re

import mlx.core as mx

# Replacements from transformers' names to ours; our own names stay the same.
_PARTS = (
    (r"^encoder\.block\.(\d+)\.layer\.0\.SelfAttention\.relative_attention_bias\.", "encoder.relative_positions."),
    (r"^decoder\.block\.(\d+)\.layer\.0\.SelfAttention\.relative_attention_bias\.", "relative_positions."),
    (r"^encoder\.block\.(\d+)\.layer\.1\.DenseReluDense\.", r"encoder.layers.\1.feed_forward."),
    (r"^encoder\.block\.(\d+)\.layer\.1\.layer_norm\.", r"encoder.layers.\1.feed_forward_norm."),
    (r"^decoder\.block\.(\d+)\.layer\.1\.EncDecAttention\.", r"layers.\1.cross_attention."),
    (r"^decoder\.block\.(\d+)\.layer\.1\.layer_norm\.", r"layers.\1.cross_attention_norm."),
    (r"^decoder\.block\.(\d+)\.layer\.2\.DenseReluDense\.", r"layers.\1.feed_forward."),
    (r"^decoder\.block\.(\d+)\.layer\.2\.layer_norm\.", r"layers.\1.feed_forward_norm."),
    (r"^encoder\.block\.(\d+)\.layer\.0\.SelfAttention\.", r"encoder.layers.\1.attention."),
    (r"^encoder\.block\.(\d+)\.layer\.0\.layer_norm\.", r"encoder.layers.\1.attention_norm."),
    (r"^decoder\.block\.(\d+)\.layer\.0\.SelfAttention\.", r"layers.\1.attention."),
    (r"^decoder\.block\.(\d+)\.layer\.0\.layer_norm\.", r"layers.\1.attention_norm."),
    (r"^encoder\.final_layer_norm\.", "encoder.norm."),
    (r"^decoder\.final_layer_norm\.", "norm."),
)
# The possible names of the embedding. The first one that exists counts, and all others are copies of it.
_EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# In the oldest checkpoints, without a meaning.
_UNUSED = re.compile(r"EncDecAttention\.relative_attention_bias\.")


def renamed(named: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the weights of a checkpoint by our names, with `lm_head.weight` only if it differs from the embedding.

    On Metal and CUDA, float16 becomes bfloat16, in which T5s were trained: the products of their feed-forward layers
    overflow in float16 (huggingface/transformers#9295).
    """
    weights = {_ours(name): array for name, array in named.items() if not _UNUSED.search(name)}
    embeddings = [weights.pop(name) for name in _EMBEDDINGS if name in weights]
    if embeddings:
        weights["shared.weight"] = embeddings[0]
    head = weights.get("lm_head.weight")
    if head is not None and embeddings and "lm_head.scales" not in weights and mx.array_equal(head, embeddings[0]):
        del weights["lm_head.weight"]
    if mx.default_device().type == mx.cpu:
        return weights
    return {name: array.astype(mx.bfloat16) if array.dtype == mx.float16 else array for name, array in weights.items()}


def _ours(name: str) -> str:
    for pattern, ours in _PARTS:
        name, count = re.subn(pattern, ours, name)
        if count:
            break
    return name

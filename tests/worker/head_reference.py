"""The MTP head of Qwen3-Next and Qwen3.5 in NumPy, after Hugging Face's layers and vLLM's qwen3_next_mtp.py.

It takes raw tensors, in which norms multiply by 1 + w and each expert has a tensor, and computes in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

_Array = np.ndarray[Any, Any]


def states_of(head: Mapping[str, mx.array], text: Mapping[str, Any], embedded: _Array, hidden: _Array) -> _Array:
    """Return the head's states [n, size] for the first n pairs of embeddings and hidden states [n, size]."""
    w = {name.removeprefix("mtp."): np.array(tensor, np.float64) for name, tensor in head.items()}
    eps = text["rms_norm_eps"]
    pairs = [
        _norm(embedded, w["pre_fc_norm_embedding.weight"], eps),
        _norm(hidden, w["pre_fc_norm_hidden.weight"], eps),
    ]
    x = np.concatenate(pairs, axis=-1) @ w["fc.weight"].T
    layer = {name.removeprefix("layers.0."): tensor for name, tensor in w.items() if name.startswith("layers.0.")}
    x = x + _attention(layer, text, _norm(x, layer["input_layernorm.weight"], eps))
    inner = _norm(x, layer["post_attention_layernorm.weight"], eps)
    mlp = {name.removeprefix("mlp."): tensor for name, tensor in layer.items() if name.startswith("mlp.")}
    x = x + (_experts(mlp, text, inner) if "gate.weight" in mlp else _mlp(mlp, "", inner))
    return _norm(x, w["norm.weight"], eps)


def _norm(x: _Array, weight: _Array, eps: float) -> _Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * (1 + weight)


def _sigmoid(x: _Array) -> _Array:
    return 1 / (1 + np.exp(-x))


def _mlp(w: Mapping[str, _Array], prefix: str, x: _Array) -> _Array:
    gate, up = x @ w[f"{prefix}gate_proj.weight"].T, x @ w[f"{prefix}up_proj.weight"].T
    return (gate * _sigmoid(gate) * up) @ w[f"{prefix}down_proj.weight"].T


def _experts(w: Mapping[str, _Array], text: Mapping[str, Any], x: _Array) -> _Array:
    scores = np.exp(x @ w["gate.weight"].T)
    scores /= scores.sum(-1, keepdims=True)
    chosen = np.argsort(-scores, axis=-1)[:, : text["num_experts_per_tok"]]
    output = np.zeros_like(x)
    for row, experts in enumerate(chosen):
        weights = scores[row, experts] / (scores[row, experts].sum() if text["norm_topk_prob"] else 1)
        for weight, expert in zip(weights, experts, strict=True):
            output[row] += weight * _mlp(w, f"experts.{expert}.", x[row])
    return output + _sigmoid(x @ w["shared_expert_gate.weight"].T) * _mlp(w, "shared_expert.", x)


def _attention(w: Mapping[str, _Array], text: Mapping[str, Any], x: _Array) -> _Array:
    n, head_dim, kv_heads = len(x), text["head_dim"], text["num_key_value_heads"]
    heads, eps = text["num_attention_heads"], text["rms_norm_eps"]
    both = (x @ w["self_attn.q_proj.weight"].T).reshape(n, heads, 2 * head_dim)
    queries, gate = both[..., :head_dim], both[..., head_dim:].reshape(n, -1)
    keys = (x @ w["self_attn.k_proj.weight"].T).reshape(n, kv_heads, head_dim)
    values = (x @ w["self_attn.v_proj.weight"].T).reshape(n, kv_heads, head_dim)
    queries = _rotated(_norm(queries, w["self_attn.q_norm.weight"], eps), text)
    keys = _rotated(_norm(keys, w["self_attn.k_norm.weight"], eps), text)
    keys, values = (np.repeat(part, heads // kv_heads, axis=1) for part in (keys, values))
    scores = np.einsum("qhd,khd->hqk", queries, keys) / head_dim**0.5
    scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    output = np.einsum("hqk,khd->qhd", weights, values).reshape(n, -1)
    return (output * _sigmoid(gate)) @ w["self_attn.o_proj.weight"].T


def _rotated(x: _Array, text: Mapping[str, Any]) -> _Array:
    """Rotate the first dimensions of x [n, heads, size] by their positions 0, 1, …; the others stay."""
    rope = text.get("rope_parameters") or text
    size = int(x.shape[-1] * rope["partial_rotary_factor"])
    angles = np.arange(len(x))[:, None] * rope["rope_theta"] ** (-np.arange(0, size, 2) / size)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)

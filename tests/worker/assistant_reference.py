"""The assistant of Gemma 4 in NumPy, after transformers' modeling_gemma4_assistant.py, in float64.

It takes tensors by their published names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

_Array = np.ndarray[Any, Any]


class AssistantReference:
    """An assistant, and the keys and values [heads, n, size] of its target by the kinds of layers."""

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, mx.array], rows: Mapping[str, tuple[mx.array, mx.array]]
    ) -> None:
        self._config, self._text = config, config["text_config"]
        self._w = {name: np.array(each.astype(mx.float32), np.float64) for name, each in tensors.items()}
        self._rows = {kind: [np.array(each, np.float64) for each in both] for kind, both in rows.items()}

    def chain(self, embeddings: _Array, state: _Array, first: int, position: int, num_tokens: int) -> list[_Array]:
        """Return the logits [vocabulary] of a chain of drafts; those that it never proposes are -inf.

        `embeddings` [vocabulary, size] are the target's, not scaled, `first` is the token that follows the state.
        """
        logits, token = [], first
        for _ in range(num_tokens):
            pair = np.concatenate([embeddings[token] * len(state) ** 0.5, state])
            output = self._layers(self._w["pre_projection.weight"] @ pair, position)
            state = self._w["post_projection.weight"] @ output
            logits.append(self._logits(output))
            token = int(logits[-1].argmax())
        return logits

    def _layers(self, x: _Array, position: int) -> _Array:
        for i, kind in enumerate(self._text["layer_types"]):
            w = {name.removeprefix(f"model.layers.{i}."): each for name, each in self._w.items()}
            attended = self._attention(w, kind, self._norm(x, w["input_layernorm.weight"]), position)
            x = x + self._norm(attended, w["post_attention_layernorm.weight"])
            inner = self._norm(x, w["pre_feedforward_layernorm.weight"])
            gate, up = w["mlp.gate_proj.weight"] @ inner, w["mlp.up_proj.weight"] @ inner
            gelu = 0.5 * gate * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
            x = x + self._norm(w["mlp.down_proj.weight"] @ (gelu * up), w["post_feedforward_layernorm.weight"])
            x = x * w["layer_scalar"]
        return self._norm(x, self._w["model.norm.weight"])

    def _attention(self, w: Mapping[str, _Array], kind: str, x: _Array, position: int) -> _Array:
        keys, values = self._rows[kind]
        if kind == "sliding_attention":
            begin = max(position + 1 - self._text["sliding_window"], 0)
            keys, values = keys[:, begin : position + 1], values[:, begin : position + 1]
        queries = (w["self_attn.q_proj.weight"] @ x).reshape(-1, keys.shape[-1])
        queries = self._rotated(self._norm(queries, w["self_attn.q_norm.weight"]), kind, position)
        keys, values = (np.repeat(each, len(queries) // len(each), axis=0) for each in (keys, values))
        scores = np.einsum("hd,hkd->hk", queries, keys)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        return w["self_attn.o_proj.weight"] @ np.einsum("hk,hkd->hd", shares, values).reshape(-1)

    def _rotated(self, x: _Array, kind: str, position: int) -> _Array:
        rope, size = self._text["rope_parameters"][kind], x.shape[-1]
        num_angles = int(rope.get("partial_rotary_factor", 1.0) * size // 2)
        angles = np.zeros(size // 2)
        angles[:num_angles] = position * rope["rope_theta"] ** (-np.arange(0, 2 * num_angles, 2) / size)
        first, second = x[..., : size // 2], x[..., size // 2 :]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _norm(self, x: _Array, weight: _Array) -> _Array:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self._text["rms_norm_eps"]) * weight

    def _logits(self, output: _Array) -> _Array:
        logits = self._w["model.embed_tokens.weight"] @ output
        if not self._config["use_ordered_embeddings"]:
            return logits
        scores = self._w["masked_embedding.centroids.weight"] @ output
        best = np.argsort(-scores)[: self._config["centroid_intermediate_top_k"]]
        ordering = self._w["masked_embedding.token_ordering"].astype(int).reshape(len(scores), -1)
        masked = np.full_like(logits, -np.inf)
        masked[ordering[best]] = logits[ordering[best]]
        return masked


def assistant_config(size_of_state: int, *, is_ordered: bool, layer_types: Sequence[str]) -> dict[str, Any]:
    """Return the configuration of a tiny assistant, for the targets of families.py."""
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
    }
    text = {
        "model_type": "gemma4_text", "hidden_size": 32, "num_hidden_layers": len(layer_types), "intermediate_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "rms_norm_eps": 1e-5,
        "vocab_size": 8192, "sliding_window": 8, "layer_types": [*layer_types], "rope_parameters": ropes,
        "hidden_size_per_layer_input": 0, "enable_moe_block": False, "use_double_wide_mlp": False,
        "num_kv_shared_layers": len(layer_types), "max_position_embeddings": 512, "final_logit_softcapping": None,
    }  # fmt: skip
    return {
        "model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": size_of_state, "use_ordered_embeddings": is_ordered, "num_centroids": 64,
        "centroid_intermediate_top_k": 5, "tie_word_embeddings": True, "text_config": text,
    }  # fmt: skip


def assistant_tensors(config: Mapping[str, Any]) -> dict[str, mx.array]:
    """Make the tensors of an assistant, random, by the published names and shapes."""
    text, size_of_state = config["text_config"], config["backbone_hidden_size"]
    size, inner, heads = text["hidden_size"], text["intermediate_size"], text["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (text["vocab_size"], size),
        "model.norm.weight": (size,),
        "pre_projection.weight": (size, 2 * size_of_state),
        "post_projection.weight": (size_of_state, size),
    }
    for i, kind in enumerate(text["layer_types"]):
        head_dim = text["head_dim" if kind == "sliding_attention" else "global_head_dim"]
        layer: dict[str, tuple[int, ...]] = {
            **{f"{name}_layernorm.weight": (size,) for name in ("input", "post_attention")},
            **{f"{name}_feedforward_layernorm.weight": (size,) for name in ("pre", "post")},
            "self_attn.q_proj.weight": (heads * head_dim, size),
            "self_attn.q_norm.weight": (head_dim,),
            "self_attn.o_proj.weight": (size, heads * head_dim),
            **{f"mlp.{name}_proj.weight": (inner, size) for name in ("gate", "up")},
            "mlp.down_proj.weight": (size, inner),
            "layer_scalar": (1,),
        }
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    if config["use_ordered_embeddings"]:
        shapes["masked_embedding.centroids.weight"] = (config["num_centroids"], size)
    mx.random.seed(5)
    tensors = {
        name: 1 + 0.3 * mx.random.normal(shape) if len(shape) == 1 else 1.5 * mx.random.normal(shape) / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }
    if config["use_ordered_embeddings"]:
        tensors["masked_embedding.token_ordering"] = mx.random.permutation(text["vocab_size"]).astype(mx.int64)
    return tensors

"""The assistant of Gemma 4 in NumPy, after transformers' modeling_gemma4_assistant.py, in float64.

It takes tensors by their published names.
"""

from __future__ import annotations

from collections.abc import Mapping
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

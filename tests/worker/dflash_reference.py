"""DFlash, DFlash 2 and DSpark in NumPy, in float64, after z-lab's model.py and vLLM's qwen3_dspark.py.

It computes the whole context for each block, and a block without a cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from tests.worker.dflash_forms import EPS, HEAD_DIM, HEADS, KV_HEADS, MASK, ROWS, YARN, Form

Array = np.ndarray[Any, Any]


class Reference:
    """A head of a form; `embedding` [rows, size] is the target's, which is its output layer too."""

    def __init__(self, form: Form, tensors: Mapping[str, mx.array], embedding: Array) -> None:
        self.form = form
        self.w = {name: np.array(each.astype(mx.float32), np.float64) for name, each in tensors.items()}
        self.embedding = embedding.astype(np.float64)

    def block(self, states: Array, anchor: int, num_draft_tokens: int) -> tuple[Array, Array]:
        """Return logits [n, own rows] and states [n, size] for draft tokens after states [positions, reads * size]."""
        form, w = self.form, self.w
        context = _norm(states @ w["fc.weight"].T, w["hidden_norm.weight"])
        tokens = [anchor, *[MASK] * (num_draft_tokens - form.anchor)]
        x = w.get("embed_tokens.weight", self.embedding)[tokens] * form.embedding_scale
        for i in range(2):
            layer = {n.removeprefix(f"layers.{i}."): each for n, each in w.items() if n.startswith(f"layers.{i}.")}
            x = x + self._around(
                layer, "attention_conv", _norm(x, layer["input_layernorm.weight"]),
                lambda y, layer=layer, i=i: self._attention(layer, i, y, context),
            )  # fmt: skip
            x = x + self._around(
                layer, "mlp_conv", _norm(x, layer["post_attention_layernorm.weight"]),
                lambda y, layer=layer: _mlp(layer, y),
            )  # fmt: skip
        last = _norm(x, w["norm.weight"])[0 if form.anchor else 1 :]
        logits = last @ w.get("lm_head.weight", self.embedding).T * form.multiplier
        return (np.tanh(logits / form.cap) * form.cap if form.cap else logits), last

    def row(self, logits: Array, state: Array, previous: int) -> Array:
        """Return the logits [target's rows] of a token; -inf for those that the head never drafts."""
        w = self.w
        if "markov" in self.form.has:
            logits = logits + w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][previous]
        if "selector" in self.form.has:
            best = np.argsort(-logits)[: self.form.top_k]
            front, back = (w[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor"))
            projected = w["candidate_selector.hidden_projection.weight"] @ state
            scores = [logits[c] + sum(front[previous] * projected * back[c]) for c in best]
            logits = np.full_like(logits, -np.inf)
            logits[best] = scores
        row = np.full(ROWS, -np.inf)
        row[np.arange(len(logits)) + w.get("d2t", np.zeros(len(logits))).astype(int)] = logits
        return row

    def rows(self, states: Array, anchor: int, drafted: Sequence[int]) -> Array:
        """Return the logits [n, target's rows] of a block with these drafted tokens, which may be any."""
        logits, last = self.block(states, anchor, len(drafted))
        before = [anchor, *drafted[:-1]]
        return np.stack([self.row(logits[i], last[i], before[i]) for i in range(len(drafted))])

    def _around(self, layer: Mapping[str, Array], name: str, x: Array, part: Any) -> Array:
        output: Array
        if "conv" not in self.form.has:
            output = part(x)
            return output
        base = layer[f"{name}.base_kernel"]
        size = self.form.config["dflash_config"]["conv_group_size"]
        own = (x @ layer[f"{name}.kernel_projection.weight"].T).reshape(len(x), 2, base.shape[1], -1)

        def convolved(y: Array, side: int) -> Array:
            result = np.zeros_like(y)
            for t in range(len(y)):
                for tap in range(min(t + 1, base.shape[1])):
                    result[t] += (base[side, tap] + np.repeat(own[t, side, tap], size)) * y[t - tap]
            return result

        output = convolved(part(convolved(x, 0)), 1)
        return output

    def _attention(self, layer: Mapping[str, Array], number: int, x: Array, context: Array) -> Array:
        n, num_keys = len(x), len(context) + len(x)
        both = np.concatenate([context, x])

        def projected(name: str, rows: Array) -> Array:
            product = rows @ layer[f"self_attn.{name}_proj.weight"].T + layer.get(f"self_attn.{name}_proj.bias", 0.0)
            return product.reshape(len(rows), -1, HEAD_DIM)

        places = np.arange(num_keys)
        queries = self._rotated(_norm(projected("q", x), layer["self_attn.q_norm.weight"]), places[-n:])
        keys = self._rotated(_norm(projected("k", both), layer["self_attn.k_norm.weight"]), places)
        keys, values = (np.repeat(each, HEADS // KV_HEADS, axis=1) for each in (keys, projected("v", both)))
        scores = np.einsum("qhd,khd->hqk", queries, keys) / HEAD_DIM**0.5
        query, key = places[-n:, None], places[None]
        seen = (key >= len(context)) | (query - key < (self.form.windows[number] or 10**9))
        if self.form.is_causal[number]:
            seen &= (key <= query) & (query - key < (self.form.windows[number] or 10**9))
        scores = np.where(seen, scores, -np.inf)
        if "sinks" in self.form.has:
            sinks = np.broadcast_to(layer["self_attn.attention_sink_bias"][:, None, None], (HEADS, n, 1))
            scores = np.concatenate([scores, sinks], axis=-1)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares = (shares / shares.sum(-1, keepdims=True))[..., :num_keys]
        output = np.einsum("hqk,khd->qhd", shares, values).reshape(n, -1)
        attended: Array = output @ layer["self_attn.o_proj.weight"].T + layer.get("self_attn.o_proj.bias", 0.0)
        return attended

    def _rotated(self, rows: Array, places: Array) -> Array:
        """Rotate rows [n, heads, size] by their places, after Hugging Face's modeling_rope_utils.py."""
        frequencies, scale = self.form.theta ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM), 1.0
        if self.form.is_yarn:
            frequencies, scale = _yarn(frequencies)
        angles = places[:, None, None] * frequencies
        cos, sin = np.cos(angles) * scale, np.sin(angles) * scale
        if self.form.is_interleaved:
            first, second = rows[..., ::2], rows[..., 1::2]
            return np.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(rows.shape)
        first, second = rows[..., : HEAD_DIM // 2], rows[..., HEAD_DIM // 2 :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _yarn(frequencies: Array) -> tuple[Array, float]:
    yarn: Mapping[str, Any] = YARN

    def dimension(rotations: float) -> float:
        length = yarn["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return HEAD_DIM * math.log(length) / (2 * math.log(yarn["rope_theta"]))

    low = max(math.floor(dimension(yarn["beta_fast"])), 0)
    high = min(math.ceil(dimension(yarn["beta_slow"])), HEAD_DIM - 1)
    interpolated = np.clip((np.arange(HEAD_DIM // 2) - low) / max(high - low, 0.001), 0, 1)
    mixed = frequencies / yarn["factor"] * interpolated + frequencies * (1 - interpolated)
    return mixed, 0.1 * math.log(yarn["factor"]) + 1


def _norm(x: Array, weight: Array) -> Array:
    normed: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight
    return normed


def _mlp(layer: Mapping[str, Array], x: Array) -> Array:
    gate, up = x @ layer["mlp.gate_proj.weight"].T, x @ layer["mlp.up_proj.weight"].T
    output: Array = (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T
    return output

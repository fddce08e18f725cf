"""GPT-2 as published on the hub, with names and fields that mlx-lm's class does not accept."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
from mlx_lm.models import gpt2

# Fields of config.json that mlx-lm ignores, and the values with which it computes.
_COMPUTED: dict[str, tuple[object, ...]] = {
    "scale_attn_by_inverse_layer_idx": (False, None),
    "scale_attn_weights": (True, None),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", None),
}
_MASKS = re.compile(r"(^|\.)attn\.(masked_)?bias$")


class Model(gpt2.Model):
    """mlx-lm's GPT-2, with any of the published names of its weights."""

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights by mlx-lm's names.

        Published weights can have a prefix, masks, and an output layer that equals the embedding. Raises ValueError if
        the output layer differs.
        """
        named = {name.removeprefix("transformer."): w for name, w in weights.items() if not _MASKS.search(name)}
        head = named.pop("lm_head.weight", None)
        if head is not None and "wte.weight" in named and not mx.array_equal(head, named["wte.weight"]):
            raise ValueError("lm_head.weight differs from the embedding, but specd serves only GPT-2 with tied weights")
        result: dict[str, mx.array] = super().sanitize(named)  # type: ignore[no-untyped-call]
        return result


def complete(config: dict[str, Any]) -> None:
    """Add the fields that newer configs of GPT-2 leave out. Raises ValueError for unsupported values."""
    for field, values in _COMPUTED.items():
        if config.get(field) not in values:
            raise ValueError(f"config.json: {field} is {config[field]!r}, but mlx-lm computes with {values[0]!r}")
    if config.get("n_inner") not in (None, 4 * config["n_embd"]):
        raise ValueError(f"config.json: n_inner is {config['n_inner']}, but mlx-lm computes with 4 * n_embd")
    config.setdefault("n_ctx", config["n_positions"])

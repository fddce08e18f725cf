"""GPT-2 as it is on the hub: with names and fields that mlx-lm's class does not take."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
from mlx_lm.models import gpt2

# Values of config.json that mlx-lm computes as if they were not there, and the ones that it computes with.
_COMPUTED: dict[str, tuple[object, ...]] = {
    "scale_attn_by_inverse_layer_idx": (False, None),
    "scale_attn_weights": (True, None),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", None),
}
_MASKS = re.compile(r"(^|\.)attn\.(masked_)?bias$")


class Model(gpt2.Model):
    """mlx-lm's GPT-2, loaded from any of the ways in which its weights are named."""

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights by the names of mlx-lm.

        They come with a prefix or without, beside masks, and with an output layer that equals the embedding. Raises
        ValueError if it does not.
        """
        named = {name.removeprefix("transformer."): w for name, w in weights.items() if not _MASKS.search(name)}
        head = named.pop("lm_head.weight", None)
        if head is not None and "wte.weight" in named and not mx.array_equal(head, named["wte.weight"]):
            raise ValueError("lm_head.weight is an output layer of its own, and specd serves GPT-2 with tied ones")
        result: dict[str, mx.array] = super().sanitize(named)  # type: ignore[no-untyped-call]
        return result


def complete(config: dict[str, Any]) -> None:
    """Add to the config of a GPT-2 what later versions leave out. Raises ValueError for what cannot be computed."""
    for field, values in _COMPUTED.items():
        if config.get(field) not in values:
            raise ValueError(f"config.json has {field} = {config[field]!r}, which mlx-lm computes as {values[0]!r}")
    if config.get("n_inner") not in (None, 4 * config["n_embd"]):
        raise ValueError(f"config.json has n_inner = {config['n_inner']}, and mlx-lm computes 4 * n_embd")
    config.setdefault("n_ctx", config["n_positions"])

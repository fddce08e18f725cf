"""Small random T5s, saved as transformers saves them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from specd.worker.model.t5.arguments import Arguments
from specd.worker.model.t5.network import T5
from tests.worker.models import write_model

CONFIG: dict[str, Any] = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "is_encoder_decoder": True,
    "vocab_size": 8192,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "relu",
    "decoder_start_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}

_PARTS = {
    "attention_norm": "layer.0.layer_norm",
    "attention": "layer.0.SelfAttention",
    "cross_attention_norm": "layer.1.layer_norm",
    "cross_attention": "layer.1.EncDecAttention",
}


def save_t5(directory: Path, **changes: Any) -> str:
    """Save a model with the embedded tokenizer."""
    config = CONFIG | changes
    mx.random.seed(0)
    pairs: Any = tree_flatten(T5(Arguments.from_dict(config)).parameters())
    weights = {name_in_transformers(name): array + 0.1 * mx.random.normal(array.shape) for name, array in pairs}
    return write_model(directory, config, weights)


def name_in_transformers(name: str) -> str:
    """Return the name that transformers has for a weight."""
    if found := re.fullmatch(r"(encoder\.)?layers\.(\d+)\.(\w+)\.(.+)", name):
        stack, layer, part, rest = found.groups()
        last = 1 if stack else 2
        feed_forward = {"feed_forward": f"layer.{last}.DenseReluDense", "feed_forward_norm": f"layer.{last}.layer_norm"}
        return f"{stack or 'decoder.'}block.{layer}.{(_PARTS | feed_forward)[part]}.{rest}"
    name = name if name.startswith(("encoder.", "shared.")) else f"decoder.{name}"
    name = name.replace("relative_positions", "block.0.layer.0.SelfAttention.relative_attention_bias")
    return re.sub(r"\.norm\.", ".final_layer_norm.", name)

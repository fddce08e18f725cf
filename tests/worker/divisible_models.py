"""Random models with heads that two and three ranks divide."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.worker.models import SMALL, save_tiny

DIVISIBLE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
}
_SIZES = {
    "vocab_size": 8192,
    "num_hidden_layers": 4,
    "hidden_size": 96,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "intermediate_size": 192,
    "eos_token_id": 0,
    "max_position_embeddings": 4096,
}


def save_divisible(directory: Path, name: str, *, noise: float = 0.0, **arguments: Any) -> str:
    """Save a random model with 12 heads, 6 of them of keys, and the embedded tokenizer; noise makes a draft of it."""
    config = {**SMALL, **_SIZES, **DIVISIBLE.get(name, {}), **arguments, "model_type": name}
    del config["rope_scaling"]
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    return save_tiny(directory, config, module.Model(module.ModelArgs.from_dict(config)), noise=noise)

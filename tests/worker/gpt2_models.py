"""Tiny GPT-2 models in the forms in which they are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import gpt2

from specd.settings import EMBEDDED_DRAFT
from tests.worker.models import write_model

NUM_POSITIONS = 512

CONFIG: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": NUM_POSITIONS,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": 8192,
    "eos_token_id": 0,
}


def make_gpt2() -> gpt2.Model:
    """Return a random network, always the same."""
    mx.random.seed(0)
    return gpt2.Model(gpt2.ModelArgs.from_dict({**CONFIG, "n_ctx": NUM_POSITIONS}))


def weights_on_the_hub(prefix: str, *, noise: float = 0.0) -> dict[str, mx.array]:
    """Return the weights as transformers has them: matrices the other way round, by other names, beside masks.

    Noise makes those of a draft.
    """
    pairs: Any = tree_flatten(make_gpt2().parameters())
    weights = {}
    for name, plain in pairs:
        array = plain + noise * mx.std(plain) * mx.random.normal(plain.shape)
        is_matrix = array.ndim == 2 and any(part in name for part in ("c_attn", "c_proj", "c_fc"))
        weights[prefix + name.removeprefix("model.")] = mx.contiguous(array.T) if is_matrix else array
    for layer in range(2):
        weights[f"{prefix}h.{layer}.attn.bias"] = mx.tril(mx.ones((1, 1, NUM_POSITIONS, NUM_POSITIONS)))
    return weights


def save_gpt2(directory: Path, weights: dict[str, mx.array], **changes: Any) -> str:
    """Save a model with the embedded tokenizer."""
    return write_model(directory, CONFIG | changes, weights, tokenizer_of=EMBEDDED_DRAFT)

"""The caches that a model will have, as far as its config and the source of its class tell, without MLX."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from specd.worker.model.outline import class_file

FULL_ATTENTION = "full attention"
# The kinds of layers in configs, by the names of docs/models.md.
_KINDS = {
    "full_attention": FULL_ATTENTION,
    "attention": FULL_ATTENTION,
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "recurrent state",
    "mamba": "recurrent state",
    "conv": "recurrent state",
}
# Classes with windows only where a config has `layer_types`.
_FULL_BY_DEFAULT = ("llama", "ministral3")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_SIZES = ("hidden_size", "n_embd", "d_model", "dim")
_KEY_HEADS = ("num_key_value_heads", "n_kv_heads")
_HEAD_SIZE = ("head_dim",)
# A model with one of these fields keeps something else than a key and a value of each head.
_LATENT = ("kv_lora_rank", "index_head_dim", "num_kv_shared_layers")
# Classes that have their number of heads from other fields, or ignore these.
_OTHER_HEADS = ("gpt2", "gpt_bigcode", "gpt_neox", "lille-130m", "plamo", "qwen")


def cache_kinds(config: Mapping[str, Any]) -> list[str] | None:
    """Return the kinds of a model's caches; None if they cannot be told before it is loaded."""
    model_type = str(config.get("model_type"))
    text = config.get("text_config") or config
    layers = text.get("layer_types") if isinstance(text, dict) else None
    file = class_file(model_type)
    if _has_default_caches(model_type) or (layers is None and file is not None and file.stem in _FULL_BY_DEFAULT):
        return [FULL_ATTENTION]
    if not isinstance(layers, list) or not layers or not all(isinstance(layer, str) for layer in layers):
        return None
    kinds = {_KINDS.get(layer, "") for layer in layers}
    return None if "" in kinds else sorted(kinds)


def cache_numbers_per_token(config: Mapping[str, Any]) -> int | None:
    """Return how many numbers a session's caches keep for each token; None if it cannot be told.

    It is told where all layers have plain full attention: a key and a value for each head of keys. Only fields that the
    class reads count.
    """
    text = config.get("text_config") or config
    file = class_file(str(config.get("model_type")))
    if not isinstance(text, dict) or cache_kinds(config) != [FULL_ATTENTION] or file is None:
        return None
    known = _words_in(file)
    if any(name in known and text.get(name) for name in _LATENT) or file.stem in _OTHER_HEADS:
        return None
    if any(isinstance(text.get(name), list) for name in (*_KEY_HEADS, *_HEAD_SIZE)):  # by layer
        return None

    def number(names: tuple[str, ...]) -> int | None:
        return next(
            (value for name in names if name in known and type(value := text.get(name)) is int and value > 0), None
        )

    layers, heads, size = map(number, (_LAYERS, _HEADS, _SIZES))
    if layers is None or heads is None or size is None:
        return None
    return 2 * layers * (number(_KEY_HEADS) or heads) * (number(_HEAD_SIZE) or size // heads)


@cache
def _words_in(file: Path) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", file.read_text()))


def _has_default_caches(model_type: str) -> bool:
    """Return whether mlx-lm makes its default cache, of full attention, for all layers of a class of models."""
    file = class_file(model_type)
    return file is not None and _makes_no_caches(file)


@cache
def _makes_no_caches(file: Path) -> bool:
    tree = ast.parse(file.read_text())
    if any(isinstance(node, ast.FunctionDef) and node.name == "make_cache" for node in ast.walk(tree)):
        return False
    bases = [
        base for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Model" for base in node.bases
    ]
    return bool(bases) and all(isinstance(base, ast.Attribute) and base.attr == "Module" for base in bases)

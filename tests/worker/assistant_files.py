"""Tiny targets of Gemma 4 and random assistants of them, in the forms in which they are published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

SLIDING, FULL = "sliding_attention", "full_attention"
Tensors = dict[str, mx.array]


@dataclass(frozen=True)
class Form:
    """A target, and the assistant's configuration and tensors."""

    family: str = "gemma4_text"
    changes: Mapping[str, Any] = field(default_factory=dict)
    is_ordered: bool = False
    sources: Mapping[str, int] = field(default_factory=lambda: {SLIDING: 3, FULL: 2})  # the layers that are read
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        return _config(is_ordered=self.is_ordered, layer_types=[SLIDING, SLIDING, FULL]) | {**self.more}


FORMS = {
    "E4B": Form(is_ordered=True),
    "31B": Form(
        changes={
            "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
            "num_global_key_value_heads": 1, "use_double_wide_mlp": False,
        },
        sources={SLIDING: 4, FULL: 5},
    ),
    "12B": Form(family="gemma4", more={"model_type": "gemma4_unified_assistant"}),
}  # fmt: skip


def _config(*, is_ordered: bool, layer_types: Sequence[str]) -> dict[str, Any]:
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
        "backbone_hidden_size": 32, "use_ordered_embeddings": is_ordered, "num_centroids": 64,
        "centroid_intermediate_top_k": 5, "tie_word_embeddings": True, "text_config": text,
    }  # fmt: skip


def assistant_tensors(config: Mapping[str, Any]) -> Tensors:
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

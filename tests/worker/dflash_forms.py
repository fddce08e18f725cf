"""Block drafters of random weights, in the forms in which they are published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

SIZE, ROWS, HEADS, KV_HEADS, HEAD_DIM, INNER, EPS = 32, 8192, 4, 2, 8, 48, 1e-5
MASK, NUM_DRAFTED, RANK = 8100, 300, 8
LAYER = {
    "model_type": "qwen3", "hidden_size": SIZE, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": EPS,
    "vocab_size": ROWS, "max_position_embeddings": 512, "hidden_act": "silu",
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

Tensors = dict[str, mx.array]


@dataclass(frozen=True)
class Form:
    """A published form: its configuration, and what that means.

    `reads` are the layers of the target with inputs that it reads; 4 stands for the output of the last. `windows` and
    `is_causal` are of its two layers. `has` are the parts with tensors of their own.
    """

    config: Mapping[str, Any]
    reads: tuple[int, ...]
    most: int
    anchor: bool = False
    has: tuple[str, ...] = ()
    windows: tuple[int | None, int | None] = (None, None)
    is_causal: tuple[bool, bool] = (False, False)
    theta: float = 10000.0
    multiplier: float = 1.0
    cap: float = 0.0
    embedding_scale: float = 1.0
    is_interleaved: bool = False
    is_yarn: bool = False
    top_k: int = 0


FORMS = {
    "z-lab's DFlash": Form(
        {
            **LAYER, "architectures": ["DFlashDraftModel"], "block_size": 6, "num_target_layers": 4,
            "rope_theta": 5000.0, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1, 2]},
        },
        (1, 2, 3), 5, theta=5000.0,
    ),
    "z-lab's DFlash with a window": Form(
        {
            **LAYER, "architectures": ["DFlashDraftModel"], "rope_theta": 10000.0, "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "dflash_config": {"block_size": 6, "mask_token_id": MASK, "target_layer_ids": [1, 2]},
        },
        (2, 3), 5, windows=(7, None), is_causal=(True, False),
    ),
    "a causal DFlash with sinks": Form(
        {
            **LAYER, "architectures": ["DFlashDraftModel"], "rope_theta": 10000.0, "num_target_layers": 4,
            "layer_types": ["sliding_attention"] * 2, "sliding_window": 8,
            "dflash_config": {
                "block_size": 5, "mask_token_id": MASK, "target_layer_ids": [1, 2], "causal": True,
                "attention_sink_bias": True,
            },
            "block_size": 5,
        },
        (2, 3), 4, windows=(8, 8), is_causal=(True, True), has=("sinks",),
    ),
    "DFlash 2": Form(
        {
            **LAYER, "architectures": ["DFlash2DraftModel"], "is_causal": False, "num_target_layers": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
            "layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "use_sliding_window": True,
            "dflash_config": {
                "block_size": 8, "mask_token_id": MASK, "target_layer_ids": [0, 1, 2], "conv_group_size": 8,
                "conv_kernel_size": 3, "selector_rank": RANK, "selector_top_k": 6, "output_multiplier": 0.7,
                "final_logit_softcapping": 5.0, "input_embedding_scale": 1.3,
            },
        },
        (1, 2, 3), 7, windows=(9, 9), has=("conv", "selector"), theta=20000.0, multiplier=0.7, cap=5.0,
        embedding_scale=1.3, top_k=6,
    ),
    "DeepSpec's DSpark": Form(
        {
            **LAYER, "architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": MASK,
            "target_layer_ids": [0, 2], "num_target_layers": 4, "markov_rank": RANK, "markov_head_type": "vanilla",
            "enable_confidence_head": True, "confidence_head_with_markov": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        },
        (1, 3), 7, True, ("embed_tokens", "lm_head", "markov", "confidence"),
    ),
    "SpecForge's DSpark": Form(
        {
            **LAYER, "architectures": ["DSparkDraftModel"], "block_size": 4, "num_target_layers": 4,
            "rope_parameters": YARN, "sliding_window": None, "layer_types": ["full_attention"] * 2,
            "markov_rank": RANK, "markov_head_type": "vanilla",
            "dflash_config": {
                "projector_type": "dspark", "markov_rank": RANK, "markov_head_type": "vanilla",
                "mask_token_id": MASK, "target_layer_ids": [1, 2], "enable_confidence_head": True,
                "confidence_head_with_markov": True,
            },
        },
        (2, 3), 4, True, ("markov", "confidence"), is_yarn=True,
    ),
    "LiquidAI's DSpark": Form(
        {
            **LAYER, "architectures": ["Lfm2DSparkDraftModel"], "rope_theta": 10000.0, "rope_is_neox_style": False,
            "block_size": 5, "markov_rank": RANK, "markov_head_type": "vanilla",
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1], "num_target_layers": 4},
        },
        (1, 2), 5, True, ("markov",), is_interleaved=True,
    ),
    "speculators' DSpark": Form(
        {
            "architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark", "block_size": 6,
            "mask_token_id": MASK, "draft_vocab_size": NUM_DRAFTED, "markov_rank": RANK, "markov_head_type": "vanilla",
            "aux_hidden_state_layer_ids": [1, 2, 4], "enable_confidence_head": True, "sliding_window_non_causal": True,
            "transformer_layer_config": {
                **LAYER, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "attention_bias": True,
                "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6,
            },
        },
        (1, 2, 4), 5, has=("embed_tokens", "lm_head", "d2t", "markov", "confidence", "bias"), windows=(None, 6),
    ),
}  # fmt: skip


def weights(form: Form) -> Tensors:
    """Make the tensors of a head, random, by the published names."""
    has, num_own = form.has, NUM_DRAFTED if "d2t" in form.has else ROWS
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (SIZE, len(form.reads) * SIZE),
        "hidden_norm.weight": (SIZE,),
        "norm.weight": (SIZE,),
    }
    for i in range(2):
        of_layer: dict[str, tuple[int, ...]] = {
            **{f"{name}.weight": (SIZE,) for name in ("input_layernorm", "post_attention_layernorm")},
            **{f"self_attn.{name}.weight": (HEAD_DIM,) for name in ("q_norm", "k_norm")},
            "self_attn.q_proj.weight": (HEADS * HEAD_DIM, SIZE),
            "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, SIZE),
            "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, SIZE),
            "self_attn.o_proj.weight": (SIZE, HEADS * HEAD_DIM),
            "mlp.gate_proj.weight": (INNER, SIZE),
            "mlp.up_proj.weight": (INNER, SIZE),
            "mlp.down_proj.weight": (SIZE, INNER),
        }
        if "bias" in has:
            of_layer |= {f"self_attn.{n}_proj.bias": of_layer[f"self_attn.{n}_proj.weight"][:1] for n in "qkvo"}
        if "sinks" in has:
            of_layer["self_attn.attention_sink_bias"] = (HEADS,)
        if "conv" in has:
            taps, group_size = (form.config["dflash_config"][f"conv_{name}_size"] for name in ("kernel", "group"))
            for name in ("attention_conv", "mlp_conv"):
                of_layer[f"{name}.base_kernel"] = (2, taps, SIZE)
                of_layer[f"{name}.kernel_projection.weight"] = (2 * taps * SIZE // group_size, SIZE)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in of_layer.items()}
    optional: dict[str, dict[str, tuple[int, ...]]] = {
        "embed_tokens": {"embed_tokens.weight": (ROWS, SIZE)},
        "lm_head": {"lm_head.weight": (num_own, SIZE)},
        "markov": {"markov_head.markov_w1.weight": (ROWS, RANK), "markov_head.markov_w2.weight": (num_own, RANK)},
        "confidence": {"confidence_head.proj.weight": (1, SIZE + RANK), "confidence_head.proj.bias": (1,)},
        "selector": {
            "candidate_selector.predecessor_codebook": (ROWS, RANK),
            "candidate_selector.successor_codebook": (ROWS, RANK),
            "candidate_selector.hidden_projection.weight": (RANK, SIZE),
        },
    }
    for name in has:
        shapes |= optional.get(name, {})
    mx.random.seed(5)
    tensors = {
        name: (name.endswith("norm.weight")) + 0.3 * mx.random.normal(shape)
        if len(shape) == 1
        else 1.5 * mx.random.normal(shape) / (1 if "codebook" in name else shape[-1] ** 0.5)
        for name, shape in shapes.items()
    }
    if "d2t" in has:
        ids = mx.sort(mx.random.permutation(ROWS)[:NUM_DRAFTED])
        tensors["d2t"] = ids.astype(mx.int64) - mx.arange(NUM_DRAFTED)
        tensors["t2d"] = mx.zeros(ROWS, mx.bool_)
    return tensors

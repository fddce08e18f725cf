"""Tiny configurations of mlx-lm's families, by the kinds of their caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.worker.models import SAVED, SMALL

WINDOW = 8
SLIDING_THEN_FULL = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA_NET = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
# What differs from SMALL, by the model of mlx-lm.
WINDOWS: dict[str, Mapping[str, Any]] = {
    "llama": SLIDING_THEN_FULL,
    "gemma3_text": {"sliding_window": WINDOW, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    "olmo3": SLIDING_THEN_FULL,
    "cohere2": {"sliding_window": WINDOW, "sliding_window_pattern": 2, "layer_norm_eps": 1e-5, "logit_scale": 1.0},
    "gpt_oss": SLIDING_THEN_FULL
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "initial_context_length": 64,
        "rope_scaling": {"rope_type": "default"},
    },
    "exaone4": {
        "sliding_window": WINDOW,
        "sliding_window_pattern": "LLLG",
        "rope_scaling": {"rope_type": "default"},
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
}
PARTS: dict[str, Mapping[str, Any]] = {
    # With more keys than its index keeps.
    "deepseek_v32": MLA | {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 12, "n_routed_experts": None},
}
STATES: dict[str, Mapping[str, Any]] = {
    "qwen3_next": DELTA_NET
    | EXPERTS
    | {"decoder_sparse_step": 1, "shared_expert_intermediate_size": 16, "mlp_only_layers": []},
    "qwen3_5": {"text_config": SMALL | DELTA_NET | {"num_hidden_layers": 4, "model_type": "qwen3_5_text"}},
    "olmo_hybrid": DELTA_NET
    | {
        "linear_allow_neg_eigval": True,
        "attention_bias": False,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "mamba": {
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "mamba2": SAVED["mamba2"],
    "falcon_h1": SAVED["falcon_h1"],
    "lfm2": {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "rwkv7": {
        "norm_eps": 1e-5,
        "head_dim": 8,
        "a_low_rank_dim": 4,
        "v_low_rank_dim": 4,
        "gate_low_rank_dim": 4,
        "decay_low_rank_dim": 4,
    },
    "recurrent_gemma": {
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "num_key_value_heads": 1,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"],
    },
    "jamba": EXPERTS
    | {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
    },
    "granitemoehybrid": {
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.3,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_proj_bias": False,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_n_groups": 2,
        "mamba_conv_bias": True,
    },
    "nemotron_h": {
        "attention_bias": False,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "mamba_proj_bias": False,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "*", "-", "M"],
    },
    "baichuan_m1": {
        "sliding_window": WINDOW,
        "sliding_window_layers": [0, 2],
        "conv_window": 2,
        "tie_word_embeddings": False,
    },
    "plamo2": {
        "hidden_size_per_head": 8,
        "mamba_d_state": 8,
        "mamba_num_heads": 4,
        "full_attention_idx": [1, 3],
    },
    "kimi_linear": EXPERTS
    | {
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "num_heads": 4,
            "head_dim": 8,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 512,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}
# The models that save queries, keys and values in a compressed form, or compute with an offset of their own.
COMPRESSED: dict[str, Mapping[str, Any]] = {
    "deepseek_v3": MLA | {"n_routed_experts": None},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 8},
}
CHUNKS: dict[str, Mapping[str, Any]] = {
    "llama4": {
        "text_config": {
            **SMALL,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 64,
            "attention_bias": False,
            "attention_chunk_size": WINDOW,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "use_qk_norm": False,
        }
    },
}
# Networks that are tried with quantised caches.
QUANTIZED = ("qwen3", "gemma3_text", "falcon_h1")
QUANTIZED_GROUP_SIZE = 32
# The families whose caches are held to the contract.
KINDS = {**WINDOWS, **PARTS, **STATES, **COMPRESSED, **CHUNKS}

"""Tiny random networks of mlx-lm's families, by the kinds of their caches.

`python -m tests.worker.families` prints docs/models.md.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

import mlx.core as mx
import structlog
from mlx.utils import tree_map

from specd.worker.cache.layers.session_layers import SessionLayers
from specd.worker.engine.cache_users import watch_cache_users
from specd.worker.engine.forward import enable_batches
from tests.worker.models import SAVED, SMALL

WINDOW = 8
SLIDING_THEN_FULL = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA_NET = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}
_MLA = {
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
    "exaone4": {"sliding_window": WINDOW, "sliding_window_pattern": "LLLG", "rope_scaling": {"rope_type": "default"}},
}
PARTS: dict[str, Mapping[str, Any]] = {
    "deepseek_v32": _MLA | {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 1000, "n_routed_experts": None},
}
STATES: dict[str, Mapping[str, Any]] = {
    "qwen3_next": _DELTA_NET
    | _EXPERTS
    | {"decoder_sparse_step": 1, "shared_expert_intermediate_size": 16, "mlp_only_layers": []},
    "qwen3_5": {"text_config": SMALL | _DELTA_NET | {"num_hidden_layers": 4, "model_type": "qwen3_5_text"}},
    "olmo_hybrid": _DELTA_NET
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
    "jamba": _EXPERTS
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
    "kimi_linear": _EXPERTS
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
    "deepseek_v3": _MLA | {"n_routed_experts": None},
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
# What a family must have that has no default and is not in SMALL, by the names of the fields.
_REQUIRED: dict[str, Any] = {
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "attention_bias": False,
    "attention_method": "MLA",
    "attention_multiplier": 0.3,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    "block_size": 512,
    "cla_share_factor": 2,
    "conv_L_cache": 3,
    "conv_bias": False,
    "d_model": 32,
    "decoder_sparse_step": 1,
    "dense_attention_every_n_layers": 2,
    "dim_model_base": 32,
    "embedding_multiplier": 1.0,
    "expert_ffn_hidden_size": 16,
    "ff_intermediate_size": 64,
    "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    "ffn_dim_divisor": 8,
    "ffn_hidden_size": 64,
    "ffn_multipliers": [2.0, 2.0, 2.0, 2.0],
    "first_k_dense_replace": 1,
    "gegelu_limit": 20.0,
    "group_norm_size": 2,
    "hidden_act": "relu2",
    "hidden_dim": 32,
    "hybrid_layer_pattern": [1, 0, 1, 0],
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 1000,
    "intermediate_size_mlp": 64,
    "is_moe_layer": [False, True, False, True],
    "kv_lora_rank": 16,
    "layer_group_size": 2,
    "layer_norm_eps": 1e-05,
    "layer_norm_epsilon": 1e-05,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "layernorm_epsilon": 1e-05,
    "logits_scaling": 1.0,
    "mla_scale_kv_lora": True,
    "mla_scale_q_lora": True,
    "mlp_bias": False,
    "mlp_only_layers": [],
    "model_dim": 32,
    "moe_intermediate_size": 16,
    "moe_layer_freq": 1,
    "moe_num_experts": 4,
    "moe_topk": 2,
    "n_ctx": 512,
    "n_embd": 32,
    "n_group": 1,
    "n_head": 4,
    "n_heads": 4,
    "n_inner": 64,
    "n_kv_heads": 2,
    "n_layer": 4,
    "n_layers": 4,
    "n_positions": 512,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "no_rope_layers": [1, 1, 1, 0],
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_groups": 2,
    "num_dense_layers": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "num_kv_reuse_layers": 2,
    "num_layers": 4,
    "num_local_experts": 4,
    "num_query_heads": [4, 4, 4, 4],
    "num_shared_expert": 1,
    "num_shared_experts": 1,
    "num_transformer_layers": 4,
    "partial_rotary_factor": 0.5,
    "post_norm": True,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_norm": True,
    "qk_rope_head_dim": 8,
    "residual_multiplier": 1.0,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "rotary_dim": 8,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.5,
    "routed_scaling_factor": 1.0,
    "scale_depth": 1.0,
    "scale_emb": 1.0,
    "scoring_func": "sigmoid",
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "swa_head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_rope_theta": 10000.0,
    "swa_v_head_dim": 8,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_bias": False,
    "use_cla": False,
    "use_expert_bias": True,
    "use_mixed_mlp_moe": True,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "v_head_dim": 8,
    "zero_expert_num": 1,
    "zero_expert_type": "identity",
}
# Families that need nothing else.
_OTHERS = """
Klear afm7 apertus bailing_hybrid bailing_moe bailing_moe_linear cohere dbrx
deepseek dots1 ernie4_5 ernie4_5_moe exaone exaone_moe gear gemma
glm glm4 glm4_moe glm_moe_dsa gpt2 gpt_bigcode gpt_neox granite
granitemoe helium hunyuan_v1_dense internlm2 internlm3 iquestloopcoder llama4_text longcat_flash
longcat_flash_ngram mimo minicpm minimax mixtral muse_glimmer nanbeige nanochat
nemotron olmo2 olmoe phi3 phi3small phimoe plamo3 qwen2
qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2
talkie telechat3
""".split()  # noqa: SIM905
# By their kind of cache, and all that a tiny configuration is known of.
KINDS = {**WINDOWS, **PARTS, **STATES, **COMPRESSED, **CHUNKS}
NETWORKS: dict[str, Mapping[str, Any]] = {**KINDS, **{name: {} for name in _OTHERS}}


@cache
def make_network(name: str) -> Any:
    """Make a network of four layers, whose logits depend much on all tokens."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    fields = inspect.signature(module.ModelArgs).parameters
    needed = {name for name, field in fields.items() if field.default is inspect.Parameter.empty}
    required = {name: value for name, value in _REQUIRED.items() if name in needed}
    sizes = {**required, **SMALL, "num_hidden_layers": 4, **NETWORKS[name]}
    network = module.Model(module.ModelArgs.from_dict({"model_type": name} | sizes))
    network.update(tree_map(lambda w: 3.0 * w if w.ndim > 1 else w, network.parameters()))
    mx.eval(network.parameters())
    if SessionLayers(network).have_states:
        watch_cache_users(network, by_session=False)
    return network


def describe(name: str) -> tuple[str, str]:
    """Return the kinds of the caches of a network, and how specd computes several sessions."""
    network = make_network(name)
    layers = SessionLayers(network)
    parts = [part for each in layers.caches for part in getattr(each, "caches", (each,))]
    kinds = sorted({_KINDS[type(part).__name__] for part in parts})
    if not enable_batches(network):
        return ", ".join(kinds), "in turns"
    by_session = any(hasattr(type(module), "unwatched") for module in network.modules()) and not layers.have_states
    return ", ".join(kinds), "in one pass, attention by session" if by_session else "in one pass"


_PAGE = """\
# Models

Families of mlx-lm that specd is tested with, by the names of mlx-lm's modules. `make test-families` decodes with a tiny
random network of each, in rounds with proposals of 0 to 8 tokens, alone and several sessions at once: the tokens are
those that mlx-lm gives one by one. `make models` writes this page. plamo3 is not exact in mlx-lm itself: its tokens
depend on the chunks of a prompt. phi3small crashes MLX on a CPU.

Families that are not in the table are tried when they are loaded. specd refuses those that compute something else after
a rewind. Sessions take turns where one pass for several of them gives other logits.

| family | caches | several sessions |
|---|---|---|"""
_KINDS = {
    "FullCache": "full attention",
    "WindowCache": "window",
    "ChunkCache": "chunk",
    "RecurrentCache": "recurrent state",
}


def main() -> None:
    """Print the page."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    print(_PAGE)
    for name in sorted(NETWORKS.keys() - {"phi3small"}, key=str.lower):  # which crashes MLX's CPU backend
        print(f"| {name} | {' | '.join(describe(name))} |")


if __name__ == "__main__":
    main()

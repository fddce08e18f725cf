"""Random models of a hundred million parameters, with the included pair's tokenizer, a kind of cache each.

    python benchmarks/random_models.py falcon_h1 DIRECTORY
    specd bench --target DIRECTORY --replay 0.7 --step-ms 3

Their text means nothing; what a pass and a rewind cost is that of a trained model.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from specd.settings import EMBEDDED_TARGET
from specd.worker.model.t5.arguments import Arguments
from specd.worker.model.t5.network import T5

WINDOW = 128

_COMMON: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
_MAMBA: dict[str, Any] = {"mamba_n_groups": 1, "mamba_conv_bias": True, "mamba_proj_bias": False}

# By the model of mlx-lm.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {"rope_theta": 1e6, "num_hidden_layers": 16},
    "gemma3_text": {
        "sliding_window": WINDOW,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 64,
        "num_hidden_layers": 18,
    },
    "falcon_h1": {
        "rope_theta": 1e6,
        "mamba_d_ssm": 1536,
        "mamba_d_head": 64,
        "mamba_n_heads": 24,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mlp_multipliers": [0.9, 0.3],
        "ssm_multipliers": [0.4, 0.25, 0.2, 0.5, 0.3],
    }
    | _MAMBA,
    "qwen3_5": {
        "text_config": {
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 12,
            "full_attention_interval": 4,
            "linear_num_value_heads": 12,
            "linear_num_key_heads": 12,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        }
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "mamba", "mamba", "mamba", "mamba", "attention"] * 2,
        "attention_bias": False,
        "attention_multiplier": 1 / 64,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "rope_theta": 10000.0,
        "position_embedding_type": "nope",
        "num_local_experts": 0,
        "shared_intermediate_size": 2048,
        "mamba_n_heads": 24,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
    }
    | _MAMBA,
    "t5": {
        "num_layers": 12,
        "d_model": 768,
        "d_kv": 64,
        "d_ff": 3072,
        "num_heads": 12,
        "feed_forward_proj": "relu",
        "decoder_start_token_id": 1,
    },
    "mamba2": {
        "num_hidden_layers": 26,
        "num_heads": 24,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 1,
        "conv_kernel": 4,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": 48,
    },
}


def save(name: str, directory: Path) -> str:
    """Save a model that `specd` can load, and return its path."""
    config: dict[str, Any] = _COMMON | CONFIGS[name] | {"model_type": name}
    if "text_config" in config:
        config["text_config"] = _COMMON | config["text_config"]
    mx.random.seed(0)
    if name == "t5":
        network: Any = T5(Arguments.from_dict(config))
        network.update(tree_map(lambda weight: 0.02 * mx.random.normal(weight.shape), network.parameters()))
    else:
        module = importlib.import_module(f"mlx_lm.models.{name}")
        network = module.Model(module.ModelArgs.from_dict(config))
    named: Any = tree_flatten(network.parameters())
    directory.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(Path(EMBEDDED_TARGET) / file, directory)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    weights = {key: array.astype(mx.bfloat16) for key, array in named}
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    print(f"{name}: {sum(array.size for array in weights.values()) / 1e6:.0f} M parameters")
    return str(directory)


def main() -> None:
    """Save one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CONFIGS)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    save(options.name, options.directory)


if __name__ == "__main__":
    main()

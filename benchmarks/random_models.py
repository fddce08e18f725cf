"""Random models with the included pair's tokenizer: of a hundred million parameters, one for each kind of cache, and of
Qwen3's sizes.

    python benchmarks/random_models.py falcon_h1 DIRECTORY
    python benchmarks/random_models.py 8b DIRECTORY --bits 4 [--head DIRECTORY]
    specd bench --target DIRECTORY --replay 0.7 --step-ms 3

Their text means nothing; what a pass and a rewind cost is that of a trained model. Those of Qwen3's sizes count: the
token after token t is t + 1 or, with --stride N, t + N, by a margin that no rounding changes. So a text is the same on
every device, a draft with the stride of its target is always right, and one with another stride never. --head saves a
random EAGLE-3 head of such a model, for what its proposals cost.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import qwen3

from specd.settings import EMBEDDED_TARGET
from specd.worker.heads.eagle3 import Eagle3Head
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

# Qwen3's sizes, and a small one for trials: hidden size, layers, width of the MLP, heads, heads of keys and values.
SIZES = {
    "32b": (5120, 64, 25600, 64, 8),
    "8b": (4096, 36, 12288, 32, 8),
    "1.7b": (2048, 28, 6144, 16, 8),
    "0.6b": (1024, 28, 3072, 16, 8),
    "tiny": (256, 4, 512, 4, 2),
}
# The part of the last token in what the output layer sees, against the sum of all layers: enough for a wide margin.
_EMBEDDING_SCALE = 2.0


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
    network.set_dtype(mx.bfloat16)
    return _write(network, config, directory)


def save_qwen3(size: str, directory: Path, *, bits: int = 0, stride: int = 1, head: Path | None = None) -> str:
    """Save a model of one of `SIZES` that counts in steps of `stride`, and return its path.

    It is in bfloat16, or quantised to `bits` in groups of 64. `head` is the directory of a head.
    """
    hidden, layers, mlp, heads, kv_heads = SIZES[size]
    config: dict[str, Any] = _COMMON | {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 64 if size == "tiny" else 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    }
    mx.random.seed(0)
    network = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    rows = mx.random.normal((config["vocab_size"], hidden))
    network.model.embed_tokens.weight = _EMBEDDING_SCALE * rows
    network.lm_head.weight = mx.roll(rows, stride, 0) / hidden**0.5
    network.set_dtype(mx.bfloat16)
    if head is not None:
        layers_to_read = [2, layers // 2, layers - 1]
        of_head = config | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers_to_read},
        }
        own = Eagle3Head(of_head, network, ("lm_head.weight",))
        own.set_dtype(mx.bfloat16)
        _write(own, of_head, head)
    if bits:
        config["quantization"] = {"group_size": 64, "bits": bits}
        nn.quantize(network, **config["quantization"])
    return _write(network, config, directory)


def _write(network: Any, config: dict[str, Any], directory: Path) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(Path(EMBEDDED_TARGET) / file, directory)
    weights: dict[str, mx.array] = dict(tree_flatten(network.parameters()))
    for array in weights.values():
        mx.eval(array)  # one by one, because random numbers are float32 at first
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    print(f"{directory.name}: {sum(array.nbytes for array in weights.values()) / 1e9:.2f} GB", flush=True)
    return str(directory)


def main() -> None:
    """Save one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*CONFIGS, *SIZES])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--bits", type=int, default=0, choices=[0, 4, 8], help="of the weights of a Qwen3; 0: bfloat16")
    parser.add_argument("--stride", type=int, default=1, help="what a Qwen3 adds to a token")
    parser.add_argument("--head", type=Path, help="save an EAGLE-3 head of a Qwen3 in this directory, too")
    options = parser.parse_args()
    if options.name in SIZES:
        save_qwen3(options.name, options.directory, bits=options.bits, stride=options.stride, head=options.head)
    else:
        save(options.name, options.directory)


if __name__ == "__main__":
    main()

"""Models made on the spot: tiny random ones, and variants of the embedded pair."""

from __future__ import annotations

import importlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama
from mlx_lm.utils import dequantize_model, load_model

from specd.model_info import ModelInfo
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.worker.engine.forward import enable_batches
from specd.worker.model.loader import LoadedModel

TINY_VOCABULARY_SIZE = 16

# Architectures of mlx-lm with different kinds of layers.
FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "gpt2", "mistral3")
LARGE_WINDOW = 32  # of every other layer of the Gemma 3 that is saved
WINDOW = 8  # of every other layer of mistral3, which has plain KV caches: its windows are masks
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": TINY_VOCABULARY_SIZE,
    "head_dim": 8,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "rope_scaling": None,
}
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_ctx": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "layer_norm_epsilon": 1e-5},
    "mistral3": {
        "text_config": SMALL
        | {
            "model_type": "ministral3",
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": WINDOW,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 16,
            },
        }
    },
}

# In the style of ChatML, of ordinary tokens.
CHAT_TEMPLATE = """\
{%- if tools %}{{ '# tools: ' + (tools | tojson) + '\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'nobody' %}{{ raise_exception('nobody may not say ' + message.content) }}{% endif %}
    {{- '# ' + message.role + ':\\n' + message.content + (message.aside or '') + '\\n# end\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '# assistant:\\n' + (opening or '') }}{% endif %}
"""
SECOND_END_TOKEN = 272  # " =", which few lines of code are without


def tiny_model(seed: int = 0) -> LoadedModel:
    """Make a random two-layer Llama over 16 tokens."""
    mx.random.seed(seed)
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=TINY_VOCABULARY_SIZE,
    )
    network = llama.Model(arguments)
    # Larger weights than the initial ones: random models otherwise say the same token everywhere.
    network.update(tree_map(lambda weight: 3.0 * weight, network.parameters()))
    mx.eval(network.parameters())
    info = ModelInfo("tiny", "llama", "", "", TINY_VOCABULARY_SIZE, 4096, (0,), "float32", "cpu")
    return LoadedModel(network, info, b"", batches=enable_batches(network))


def softened_model(seed: int, sharpness: float) -> LoadedModel:
    """Make a tiny model that leaves something to chance: `tiny_model` nearly always knows what comes next."""
    model = tiny_model(seed)
    model.network.model.norm.weight = sharpness * model.network.model.norm.weight
    mx.eval(model.network.parameters())
    return model


def small_network(name: str, *, weight_factor: float = 1.0, **arguments: Any) -> Any:
    """Make a random network of one of the families, as mlx-lm has them, with some arguments of its own.

    With the initial weights, attention hardly tells one token from another; larger ones make it sharp.
    """
    module = importlib.import_module(f"mlx_lm.models.{name}")
    own = _ARGUMENTS.get(name, {})
    mx.random.seed(0)
    network = module.Model(module.ModelArgs.from_dict({"model_type": name, **SMALL, **own, **arguments}))
    network.update(tree_map(lambda w: weight_factor * w if w.ndim > 1 else w, network.parameters()))
    mx.eval(network.parameters())
    return network


def save_odd_draft(kind: str, directory: Path) -> str:
    """Save, or name, a draft for the embedded target that is not the usual one."""
    match kind:
        case "random":  # of the embedded draft's shape
            return _save_variant(EMBEDDED_DRAFT, directory, lambda name, weight: mx.random.normal(weight.shape) * 0.05)
        case "always right":
            return EMBEDDED_TARGET
        case "always wrong":  # the target with its output turned round: its favourite is the target's least likely
            return _save_variant(EMBEDDED_TARGET, directory, lambda name, weight: weight, negate_output=True)
    raise AssertionError(kind)


def save_noisy_draft(directory: Path, *, noise: float) -> str:
    """Save the embedded draft with noise in its weights, relative to their spread."""
    mx.random.seed(1)
    return _save_variant(
        EMBEDDED_DRAFT, directory, lambda name, weight: weight + noise * mx.std(weight) * mx.random.normal(weight.shape)
    )


def save_foreign_draft(directory: Path) -> str:
    """Save the embedded draft with two entries of its vocabulary swapped."""
    shutil.copytree(EMBEDDED_DRAFT, directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["return"], vocabulary["import"] = vocabulary["import"], vocabulary["return"]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(directory)


def save_poisoned(source: str, directory: Path, *, nan: int, inf: int) -> str:
    """Save a model of the embedded pair that gives logits that are not finite after the tokens `nan` and `inf`.

    Their embeddings are NaN and infinite; the output layer, which shared them, gets a sound copy of its own.
    """
    weights: dict[str, mx.array] = dict(mx.load(str(Path(source) / "model.safetensors")))  # type: ignore[arg-type]
    for name in ("weight", "scales", "biases"):
        weights[f"lm_head.{name}"] = weights[f"model.embed_tokens.{name}"]
    scales = mx.array(weights["model.embed_tokens.scales"])
    scales[nan], scales[inf] = math.nan, math.inf
    weights["model.embed_tokens.scales"] = scales
    copy_variant(source, directory, {"config.json": {"tie_word_embeddings": False}}, without=["model.safetensors"])
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    return str(directory)


def save_chat_target(directory: Path) -> str:
    """Make a variant of the embedded target with a chat template, and with two end tokens."""
    changes: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {"chat_template": CHAT_TEMPLATE},
        "generation_config.json": {"eos_token_id": [0, SECOND_END_TOKEN]},
    }
    return copy_variant(EMBEDDED_TARGET, directory, changes)


# Models with windows, with recurrent states, and with such states in some layers, by the model of mlx-lm.
SAVED: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": LARGE_WINDOW, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    "mamba2": {
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": (0.001, 100.0),
        "time_step_rank": 4,
    },
    "falcon_h1": {
        "mamba_d_head": 8,
        "mamba_d_ssm": 64,
        "mamba_d_state": 8,
        "mamba_n_heads": 8,
        "mlp_multipliers": [0.9, 0.3],
        "ssm_multipliers": [0.4, 0.25, 0.2, 0.5, 0.3],
    },
}


def save_random_model(directory: Path, name: str, *, noise: float = 0.0) -> str:
    """Save a small random model with the embedded tokenizer; noise makes a draft of the target."""
    config = SMALL | {"vocab_size": 8192, "num_hidden_layers": 4} | SAVED[name]
    config |= {"model_type": name, "eos_token_id": 0}
    del config["rope_scaling"]
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    return save_tiny(directory, config, module.Model(module.ModelArgs.from_dict(config)), noise=noise)


def save_tiny(
    directory: Path, config: Mapping[str, Any], network: Any, *, noise: float, weight_factor: float = 2.0
) -> str:
    """Save a network with the embedded tokenizer, its matrices multiplied by a factor and with noise."""
    weights: Any = tree_flatten(network.parameters())
    mx.random.seed(1)
    grown = {
        name: (weight_factor * w + noise * mx.random.normal(w.shape) * mx.std(w)) if w.ndim > 1 else w
        for name, w in weights
    }
    return write_model(directory, config, grown)


def write_model(
    directory: Path, config: Mapping[str, Any], weights: dict[str, mx.array], *, tokenizer_of: str = EMBEDDED_TARGET
) -> str:
    """Write a model directory with the tokenizer of another model, and return its path."""
    directory.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(Path(tokenizer_of) / name, directory)
    (directory / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    return str(directory)


def copy_variant(
    source: str, directory: Path, changes: Mapping[str, Mapping[str, Any]], *, without: Sequence[str] = ()
) -> str:
    """Make a model of the files of another: in some of them, by their names, the changed entries differ."""
    directory.mkdir(parents=True)
    for path in Path(source).iterdir():
        if path.name in changes:
            (directory / path.name).write_text(json.dumps({**json.loads(path.read_text()), **changes[path.name]}))
        elif path.name not in without:
            shutil.copyfile(path, directory / path.name)
    return str(directory)


def _save_variant(
    source: str, directory: Path, change: Callable[[str, mx.array], mx.array], *, negate_output: bool = False
) -> str:
    network, _ = load_model(Path(source))
    network.set_dtype(mx.float32)
    network = dequantize_model(network)
    parameters: Any = tree_flatten(network.parameters())
    weights = {name: change(name, weight) for name, weight in parameters}
    config = json.loads((Path(source) / "config.json").read_text())
    del config["quantization"], config["quantization_config"]
    if negate_output:
        config["tie_word_embeddings"] = False
        weights["lm_head.weight"] = -weights["model.embed_tokens.weight"]
    return write_model(directory, config, weights, tokenizer_of=source)

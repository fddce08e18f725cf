"""Tiny targets with MTP heads of random weights, in the layouts in which such heads are published."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from specd.worker.model.loader import read
from tests.worker.families import save_family

GROUP = 32  # numbers with one scale, where a head is quantised
FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_ROPE = {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 0, 0]}
_EMBEDDED = "model-00002-of-00002.safetensors"
_SHIFTED = (
    *(".input_layernorm.weight", ".post_attention_layernorm.weight"),
    *("model.norm.weight", ".q_norm.weight", ".k_norm.weight"),
)

Tensors = dict[str, mx.array]


@dataclass(frozen=True)
class Target:
    """A target without a head: its files, its network, and its configuration of the text model."""

    directory: Path
    network: Any
    text: Mapping[str, Any]


def save_target(directory: Path, family: str, *, is_raw: bool = False) -> Target:
    """Save a tiny target with the promise of a head, as a converter writes it, or raw, as Hugging Face has it."""
    save_family(directory, family)
    config = json.loads((directory / "config.json").read_text())
    text = config.get("text_config", config)
    text |= {"mtp_num_hidden_layers": 1, "norm_topk_prob": family == "qwen3_next"}
    if family != "qwen3_next":
        text["rope_parameters"] = _ROPE
    (directory / "config.json").write_text(json.dumps(config))
    if is_raw:
        path = str(directory / "model.safetensors")
        weights: Any = mx.load(path)
        weights = {name: _raw(name, weight) for name, weight in weights.items()}
        mx.save_safetensors(path, unstacked(weights, 4) if family == "qwen3_next" else weights, {"format": "pt"})
    network, _, _ = read(str(directory), directory)
    network.set_dtype(mx.float32)
    return Target(directory, network, text)


def _raw(name: str, weight: mx.array) -> mx.array:
    if "conv1d" in name:
        return mx.contiguous(weight.moveaxis(2, 1))
    return weight - 1 if name.endswith(_SHIFTED) else weight


def unstacked(weights: Tensors, num_experts: int) -> Tensors:
    """Return weights with a tensor for each expert, as Hugging Face's Qwen3-Next has them."""
    parted: Tensors = {}
    for name, weight in weights.items():
        if ".switch_mlp." in name:
            for i in range(num_experts):
                parted[name.replace("switch_mlp", f"experts.{i}")] = mx.contiguous(weight[i])
        else:
            parted[name] = weight
    return parted


def raw_head(text: Mapping[str, Any], seed: int = 0) -> Tensors:
    """Make the tensors of a head as Hugging Face has them, by the names and shapes of vLLM's and mlx-vlm's loaders."""
    size, head_dim = text["hidden_size"], text["head_dim"]
    heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, 2 * size),
        "pre_fc_norm_embedding.weight": (size,),
        "pre_fc_norm_hidden.weight": (size,),
        "norm.weight": (size,),
        "layers.0.input_layernorm.weight": (size,),
        "layers.0.post_attention_layernorm.weight": (size,),
        "layers.0.self_attn.q_proj.weight": (2 * heads * head_dim, size),
        "layers.0.self_attn.k_proj.weight": (kv_heads * head_dim, size),
        "layers.0.self_attn.v_proj.weight": (kv_heads * head_dim, size),
        "layers.0.self_attn.o_proj.weight": (size, heads * head_dim),
        "layers.0.self_attn.q_norm.weight": (head_dim,),
        "layers.0.self_attn.k_norm.weight": (head_dim,),
    }
    if num_experts := text.get("num_experts"):
        shapes |= {"layers.0.mlp.gate.weight": (num_experts, size), "layers.0.mlp.shared_expert_gate.weight": (1, size)}
        mlps = {f"experts.{i}.": text["moe_intermediate_size"] for i in range(num_experts)}
        mlps |= {"shared_expert.": text["shared_expert_intermediate_size"]}
    else:
        mlps = {"": text["intermediate_size"]}
    for name, inner in mlps.items():
        for part, shape in {"gate": (inner, size), "up": (inner, size), "down": (size, inner)}.items():
            shapes[f"layers.0.mlp.{name}{part}_proj.weight"] = shape
    mx.random.seed(seed)
    return {
        f"mtp.{name}": mx.random.normal(shape) * (0.3 if len(shape) == 1 else 1.5 / shape[-1] ** 0.5)
        for name, shape in shapes.items()
    }


def stacked(head: Tensors) -> Tensors:
    """Return a raw head with its experts as Qwen3.6 has them: all in one, gate and up as one projection."""
    prefix = "mtp.layers.0.mlp.experts."
    rest = {name: tensor for name, tensor in head.items() if not name.startswith(prefix)}
    count = len({name.split(".")[5] for name in head if name.startswith(prefix)})

    def of_all(part: str) -> mx.array:
        return mx.stack([head[f"{prefix}{i}.{part}_proj.weight"] for i in range(count)])

    return rest | {
        f"{prefix}gate_up_proj": mx.concatenate([of_all("gate"), of_all("up")], axis=1),
        f"{prefix}down_proj": of_all("down"),
    }


def converted(head: Tensors, *, bits: int = 0) -> Tensors:
    """Return a head as converters to MLX write it, in `bits` if any: names still have `mtp.` in front."""
    result: Tensors = {}
    for name, tensor in head.items():
        if ".experts." in name:
            front, _, back = name.partition("experts.")
            number, _, part = back.partition(".")
            if number == "0":
                each = [head[f"{front}experts.{i}.{part}"] for i in range(_num_experts(head))]
                result[f"{front}switch_mlp.{part}"] = mx.stack(each)
        else:
            result[name] = tensor + 1 if tensor.ndim == 1 else tensor
    quantised: Tensors = {}
    for name, tensor in result.items():
        parts = mx.quantize(tensor, GROUP, own) if (own := _bits(name, tensor, bits)) else [tensor]
        base = name.removesuffix("weight")
        quantised |= dict(zip((name, f"{base}scales", f"{base}biases"), parts, strict=False))
    return quantised


def rounded(head: Tensors, bits: int) -> Tensors:
    """Return a raw head with the values that its weights have in `bits`."""
    return {
        name: mx.dequantize(*mx.quantize(tensor, GROUP, own), GROUP, own) if own else tensor
        for name, tensor in head.items()
        for own in [_bits(name, tensor, bits)]
    }


def _bits(name: str, tensor: mx.array, bits: int) -> int:
    """Return the bits of a tensor in a head of mostly `bits`, 0 for none: a router has 8, and norms have none."""
    if not bits or tensor.ndim == 1 or tensor.shape[-1] % GROUP:
        return 0
    return 8 if name.endswith("mlp.gate.weight") else bits


def _num_experts(head: Tensors) -> int:
    return len({name for name in head if name.endswith(".gate_proj.weight") and ".experts." in name})


def embed(directory: Path, head: Tensors, mark: str | None) -> None:
    """Add a head to the target's own tensors, in a file with this mark as its format."""
    _save(directory / _EMBEDDED, head, mark)


def save_beside(directory: Path, file: str, head: Tensors, mark: str | None = "mlx") -> None:
    """Save a head in a file of its own in the target's directory."""
    (directory / file).parent.mkdir(exist_ok=True)
    _save(directory / file, head, mark)


def save_apart(directory: Path, head: Tensors, text: Mapping[str, Any], mark: str | None = "mlx") -> str:
    """Save a converted head as a model of its own, as mlx-vlm does, and return its name."""
    directory.mkdir(parents=True)
    bare = {name.removeprefix("mtp."): tensor for name, tensor in head.items()}
    _save(directory / "model.safetensors", bare, mark)
    config = {"model_type": "qwen3_5_mtp", "block_size": 3, "text_config": dict(text)}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def save_repository(directory: Path, config: Mapping[str, Any], tensors: Tensors) -> str:
    """Save a head with a configuration of its own, as it is published, and return its name."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    _save(directory / "model.safetensors", tensors, "pt")
    return str(directory)


def network_of(directory: Path) -> Any:
    """Return the network of a target's files, in float32."""
    network, _, _ = read("target", directory)
    network.set_dtype(mx.float32)
    return network


def _save(path: Path, tensors: Tensors, mark: str | None) -> None:
    mx.save_safetensors(str(path), tensors, {"format": mark} if mark else None)


def save_bigram(directory: Path, family: str) -> Target:
    """Save a target with an exact head, raw and embedded.

    Its layers write nothing, so the next token depends on the last one alone: a state is the embedding, normalised. The
    head's layer writes nothing either, and `fc` takes the embedding.
    """
    target = save_target(directory, family, is_raw=True)
    path = str(directory / "model.safetensors")
    weights: Any = mx.load(path)
    silent = ("o_proj.weight", "out_proj.weight", "down_proj.weight", ".experts.down_proj")
    weights = {name: mx.zeros_like(w) if name.endswith(silent) else w for name, w in weights.items()}
    final = next(weight for name, weight in weights.items() if name.endswith("model.norm.weight"))
    mx.eval(weights)
    mx.save_safetensors(path, weights, {"format": "pt"})
    head = {
        name: mx.zeros_like(w) if w.ndim == 1 or name.endswith(silent) else w
        for name, w in raw_head(target.text).items()
    }
    size = final.size
    head |= {"mtp.norm.weight": final, "mtp.fc.weight": mx.concatenate([mx.eye(size), mx.zeros((size, size))], axis=1)}
    embed(directory, head, "pt")
    return target


def save_bigram_apart(directory: Path, family: str) -> tuple[Target, str]:
    """Save a target with an exact head, which has a directory of its own beside the target's; return its name, too."""
    target = save_bigram(directory, family)
    file = directory / _EMBEDDED
    head: Any = mx.load(str(file))
    mx.eval(head)
    file.unlink()
    return target, save_apart(directory.parent / "head", converted(head), target.text)

"""Tiny targets of many families with MTP heads as published: random tensors, and the logits that they give by hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache

from specd.worker.model.loader import read
from tests.worker.families import save_family
from tests.worker.family_kinds import WINDOW
from tests.worker.head_files import Tensors

# The pairs, more than a window and more than an index keep.
IDS = mx.array([[5, 9, 100, 7, 8000, 3, 44, 2, 77, 31, 600, 12]])
NEXT = mx.array([[9, 100, 7, 8000, 3, 44, 2, 77, 31, 600, 12, 4000]])


@dataclass(frozen=True)
class Published:
    """A published head, after the file of vLLM or another engine that `layouts.py` names.

    `parts` are the names of the norm of the embedding, the norm of the state, `fc`, and the last norm, and `layers` the
    beginnings of the layers' names. `make` makes the layers, from mlx-lm's module and the target's arguments. `spelled`
    are parts of names that differ from mlx-lm's. `unread` are tensors that the head has beside. `config` completes the
    target's configuration.
    """

    parts: Sequence[str]
    layers: Sequence[str]
    make: Callable[[Any, Any], Sequence[Any]]
    spelled: Mapping[str, str] = field(default_factory=dict)
    unread: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    state_first: bool = False
    window: int = 0
    adds_one: bool = False
    before_norm: bool = False
    num_caches: int = 1


def _next_n(make: Callable[[Any, Any], Any], *, prefix: str = "model.layers.4.", **options: Any) -> Published:
    parts = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    unread = [f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head.weight"]
    named = [f"{prefix}{part}" for part in parts]
    return Published(named, [prefix], lambda module, args: [make(module, args)], **{"unread": unread, **options})


class _LongCatLayer:
    """A layer of LongCat-Flash's head, after vLLM's longcat_flash_mtp.py: one attention, and no experts."""

    def __init__(self, module: Any, args: Any) -> None:
        self._parts = {"self_attn": module.LongcatFlashMLA(args), "transformer_layer.mlp": module.LongcatFlashMLP(args)}
        self._norms = {f"{name}_layernorm": mx.ones(args.hidden_size) for name in ("input", "post_attention")}
        self._eps = args.rms_norm_eps

    def parameters(self) -> dict[str, Any]:
        norms = {name: {"weight": weight} for name, weight in self._norms.items()}
        return norms | {name: part.parameters() for name, part in self._parts.items()}

    def update(self, weights: Mapping[str, Any]) -> None:
        self._norms = {name: weights[name]["weight"] for name in self._norms}
        self._parts["self_attn"].update(weights["self_attn"])
        self._parts["transformer_layer.mlp"].update(weights["transformer_layer"]["mlp"])

    def __call__(self, x: mx.array, mask: mx.array, cache: Any) -> mx.array:
        first, second = (mx.array(norm) for norm in self._norms.values())
        x = x + self._parts["self_attn"](mx.fast.rms_norm(x, first, self._eps), mask, cache)
        output: mx.array = x + self._parts["transformer_layer.mlp"](mx.fast.rms_norm(x, second, self._eps))
        return output


_EXPERTS_OF_NEMOTRON = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_DSA = {"index_topk": 4}  # keys that an index keeps: fewer than the pairs
_QWEN_NAMES = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
HEADS = {
    "glm4_moe": _next_n(lambda module, args: module.DecoderLayer(args, 4)),
    "glm4_moe_lite": _next_n(lambda module, args: module.Glm4MoeLiteDecoderLayer(args, 4)),
    "deepseek_v3": _next_n(lambda module, args: module.DeepseekV3DecoderLayer(args, 4)),
    "kimi_k25": _next_n(
        lambda module, args: sys.modules["mlx_lm.models.deepseek_v3"].DeepseekV3DecoderLayer(args, 4),
        prefix="language_model.model.layers.4.",
    ),
    "deepseek_v32": _next_n(lambda module, args: module.DeepseekV32DecoderLayer(args, 4), num_caches=2, config=_DSA),
    "glm_moe_dsa": _next_n(
        lambda module, args: sys.modules["mlx_lm.models.deepseek_v32"].DeepseekV32DecoderLayer(args, 4),
        num_caches=2,
        config=_DSA,
    ),
    "mimo": Published(
        [f"model.mtp_layers.0.{name}" for name in ("token_layernorm", "hidden_layernorm", "input_proj")]
        + ["model.mtp_layers.0.final_layernorm"],
        ["model.mtp_layers.0."],
        lambda module, args: [module.TransformerBlock(args)],
        state_first=True,
    ),
    "mimo_v2_flash": Published(
        [f"model.mtp.layers.0.{name}" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")],
        ["model.mtp.layers.0."],
        lambda module, args: [module.DecoderLayer(args, is_moe=False, is_sliding_window=True)],
        spelled={"post_attention_layernorm": "pre_mlp_layernorm"},
        unread=["model.mtp.layers.1.enorm.weight", "model.mtp.layers.2.mlp.up_proj.weight"],
        window=WINDOW,
    ),
    "step3p5": Published(
        [f"model.layers.4.{name}" for name in ("enorm", "hnorm", "eh_proj", "transformer.shared_head.norm")],
        ["model.layers.4."],
        lambda module, args: [module.Step3p5DecoderLayer(args, 4)],
        unread=["model.layers.4.transformer.shared_head.output.weight", "model.layers.5.enorm.weight"],
        config={"layer_types": None},  # even layers have windows then
        window=WINDOW,
        adds_one=True,
        before_norm=True,
    ),
    "ernie4_5_moe": Published(
        [f"model.mtp_{name}.0" for name in ("emb_norm", "hidden_norm", "linear_proj")],
        ["model.mtp_block.0."],
        lambda module, args: [module.Ernie4_5_DecoderLayer(replace(args, moe_layer_start_index=9), 0)],
        unread=["model.mtp_emb_norm.1.weight"],
    ),
    "exaone_moe": Published(
        [f"mtp.{name}" for name in _QWEN_NAMES],
        ["mtp.layers.0."],
        lambda module, args: [
            module.DecoderLayer(
                replace(args, layer_types=["full_attention", "sliding_attention"], is_moe_layer=[False]), 0
            )
        ],
    ),
    "nemotron_h": Published(
        [f"mtp.layers.{name}" for name in ("0.enorm", "0.hnorm", "0.eh_proj", "1.final_layernorm")],
        ["mtp.layers.0.", "mtp.layers.1."],
        lambda module, args: [module.NemotronHBlock(args, "*"), module.NemotronHBlock(args, "E")],
        spelled={"fc1": "up_proj", "fc2": "down_proj"},
        config=_EXPERTS_OF_NEMOTRON,
    ),
    "longcat_flash": Published(
        [f"model.mtp.{name}" for name in ("layers.0.enorm.m", "layers.0.hnorm.m", "layers.0.eh_proj", "norm")],
        ["model.mtp.layers.0."],
        lambda module, args: [_LongCatLayer(module, args)],
        unread=["model.mtp.embed_tokens.weight"],
    ),
    "bailing_moe_v3": Published(
        [f"model.layers.4.{name}" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")],
        ["model.layers.4."],
        lambda module, args: [module.BailingDecoderLayer(args, 3)],
        unread=["model.layers.4.shared_head.head.weight"],
    ),
}


def save(directory: Path, family: str) -> tuple[Tensors, Callable[..., mx.array]]:
    """Save a tiny target; return a raw head for it, and the logits that a network has with it, by hand."""
    published = HEADS[family]
    save_family(directory, family)
    config = json.loads((directory / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in published.config}
    config |= {name: value for name, value in published.config.items() if value is not None}
    config["num_nextn_predict_layers"] = 1
    (directory / "config.json").write_text(json.dumps(config))
    if published.adds_one:
        _make_raw(directory / "model.safetensors")
    network, _, _ = read(family, directory)
    network.set_dtype(mx.float32)
    args: Any = _text_model(network).args
    module = sys.modules[type(network).__module__]
    layers = published.make(module, args)
    mx.random.seed(3)
    weights = [_random_weights(layer) for layer in layers]
    size = args.hidden_size
    eps = next(getattr(args, name) for name in _EPSILONS if hasattr(args, name))
    norms = [1 + 0.3 * mx.random.normal((size,)) for _ in range(3)]
    fc = mx.random.normal((size, 2 * size)) / size**0.5

    def logits(other: Any, drafted: Sequence[int] = ()) -> mx.array:
        """Return the logits of all pairs; behind them come those of a chain of drafts, with the head's own states."""
        text = _text_model(other)
        inner = text.backbone if "backbone" in text else text.model
        embedding = next(inner[name] for name in ("embed_tokens", "embeddings", "word_embeddings") if name in inner)
        output = text.lm_head if text.get("lm_head") is not None else embedding.as_linear
        last = norms[2] if len(published.parts) == 4 else inner.norm.weight

        def outputs(tokens: mx.array, hidden: mx.array) -> mx.array:
            of_token = mx.fast.rms_norm(embedding(tokens), norms[0], eps)
            of_state = mx.fast.rms_norm(hidden, norms[1], eps)
            pair = [of_state, of_token] if published.state_first else [of_token, of_state]
            x = mx.concatenate(pair, axis=-1) @ fc.T
            i = mx.arange(tokens.size)
            mask = (i[:, None] >= i) & (i[:, None] - i < (published.window or tokens.size))
            caches = [KVCache() for _ in range(published.num_caches)]
            for layer in layers:
                x = layer(x, mask, caches if published.num_caches > 1 else caches[0])
            return x

        tokens, hidden = NEXT, _before_norm(inner) if published.before_norm else inner(IDS)
        for token in drafted:
            state = outputs(tokens, hidden)[:, -1:]
            hidden = mx.concatenate(
                [hidden, state if published.before_norm else mx.fast.rms_norm(state, last, eps)], axis=1
            )
            tokens = mx.concatenate([tokens, mx.array([[token]])], axis=1)
        result: mx.array = output(mx.fast.rms_norm(outputs(tokens, hidden), last, eps))
        return result

    tensors = (norms[0], norms[1], fc, norms[2])
    head = {f"{name}.weight": tensor for name, tensor in zip(published.parts, tensors, strict=False)}
    for prefix, own in zip(published.layers, weights, strict=True):
        for name, tensor in _as_published(own, args).items():
            parts = [published.spelled.get(part, part) for part in name.split(".")]
            head[f"{prefix}{'.'.join(parts)}"] = tensor
    if published.adds_one:
        head = {name: tensor - 1 if "norm" in name else tensor for name, tensor in head.items()}
    return head | {name: mx.zeros((8, 2)) for name in published.unread}, logits


def _make_raw(path: Path) -> None:
    """Write the tensors of a Step 3.5 as Hugging Face has them: norms without their 1, and experts in `moe`."""
    weights: Any = mx.load(str(path))
    spelled = {"mlp.switch_mlp": "moe", "mlp.gate.gate": "moe.gate", "mlp.gate.router": "moe.router"}
    spelled["mlp.share_expert"] = "share_expert"
    raw = {}
    for name, tensor in weights.items():
        own = next((part for part in spelled if f".{part}" in name), "")
        raw[name.replace(own, spelled.get(own, ""))] = tensor - 1 if "norm" in name else tensor
    mx.eval(raw)
    mx.save_safetensors(str(path), raw, {"format": "pt"})


_EPSILONS = ("rms_norm_eps", "layernorm_epsilon", "layer_norm_epsilon")


def _random_weights(layer: Any) -> Tensors:
    shapes: Any = tree_flatten(layer.parameters())
    weights = {
        name: mx.random.normal(each.shape) / (each.shape[-1] ** 0.5 if each.ndim > 1 else 3) for name, each in shapes
    }
    weights = {name: 1 + each if "norm" in name and name.endswith("weight") else each for name, each in weights.items()}
    layer.update(tree_unflatten([*weights.items()]))
    return weights


def _text_model(network: Any) -> Any:
    return getattr(network, "language_model", network)


def _before_norm(inner: Any) -> mx.array:
    norm, inner.norm = inner.norm, lambda x: x
    hidden: mx.array = inner(IDS)
    inner.norm = norm
    return hidden


def _as_published(weights: Tensors, args: Any) -> Tensors:
    """Return a layer's weights with a tensor for each expert, and keys and values of latents in one."""
    result: Tensors = {}
    for name, tensor in weights.items():
        attention, _, part = name.partition(".")
        if ".switch_mlp." in name:
            result |= {name.replace("switch_mlp", f"experts.{i}"): mx.contiguous(each) for i, each in enumerate(tensor)}
        elif part == "embed_q.weight":
            both = mx.concatenate([tensor.swapaxes(-1, -2), weights[f"{attention}.unembed_out.weight"]], axis=1)
            result[f"{attention}.kv_b_proj.weight"] = mx.contiguous(both.reshape(-1, both.shape[-1]))
        elif part != "unembed_out.weight":
            result[name] = tensor
    return result

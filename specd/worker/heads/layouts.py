"""The kinds of MTP heads: the layer that each has, and the names of its tensors in published files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import deepseek_v3, glm4_moe, glm4_moe_lite, mimo, qwen3_5, qwen3_next

Tensors = dict[str, mx.array]


@dataclass(frozen=True)
class HeadLayout:
    """A kind of head.

    `promise` is the field of a config with the number of heads. `pattern`, in which N stands for the number of the
    target's layers, finds the tensors in the target's files; its group is the name within the head. `names` maps the
    beginnings of these names to those of `MTPHead`, the longest first, and "" drops a tensor. `make_layer` makes the
    head's layer for a target's arguments. In `fc` the state can come before the embedding, `state_first`. Some layers
    need a mask as an array. `adds_one` is whether norms multiply by 1 + w until a converter adds the 1.
    """

    promise: str
    pattern: str
    make_layer: Callable[[Any], Module]
    names: Mapping[str, str] = field(default_factory=dict)
    state_first: bool = False
    needs_array: bool = False
    adds_one: bool = False

    def renamed(self, tensors: Mapping[str, mx.array], network: Any) -> Tensors:
        """Return the head's tensors among those of a target's files, by the names of `MTPHead`, lazily."""
        num_layers = len(network.layers)
        pattern = re.compile(self.pattern.replace("N", str(num_layers)))
        own = {found[1]: tensor for name, tensor in tensors.items() if (found := pattern.fullmatch(name))}
        if not self.names:
            return own
        named = {self._name(name): tensor for name, tensor in own.items() if self._name(name)}
        if self.state_first and "fc.weight" in named:
            of_state, of_embedding = mx.split(named["fc.weight"], 2, axis=-1)
            named["fc.weight"] = mx.concatenate([of_embedding, of_state], axis=-1)
        return _as_layer_of(network, named, num_layers - 1)

    def _name(self, name: str) -> str:
        for beginning, own in self.names.items():
            if name.startswith(beginning):
                return own and own + name.removeprefix(beginning)
        return f"layers.0.{name}"


def layout_of(network: Any) -> HeadLayout | None:
    """Return the layout of a network's head, by the class of its layers; None if its heads are not known."""
    layers: Sequence[Module] = getattr(network, "layers", None) or [Module()]
    return next((layout for kind, layout in _LAYOUTS.items() if isinstance(layers[0], kind)), None)


def _as_layer_of(network: Any, tensors: Tensors, number: int) -> Tensors:
    """Let mlx-lm convert a layer as it converts those of the target: experts are stacked, 8-bit floats decoded."""
    prefix, rest = f"model.layers.{number}.", "layers.0."
    own = {name.replace(rest, prefix, 1): tensor for name, tensor in tensors.items() if name.startswith(rest)}
    converted = network.sanitize(own)
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith(rest)}
    return others | {name.replace(prefix, rest, 1): tensor for name, tensor in converted.items()}


def _qwen_layer(kind: Callable[..., Module]) -> Callable[[Any], Module]:
    def make(args: Any) -> Module:
        args = copy(args)
        # The only layer of the head has full attention, and experts if the model has experts.
        args.full_attention_interval = args.decoder_sparse_step = 1
        args.mlp_only_layers = []
        return kind(args, layer_idx=0)

    return make


def _layer_behind_all(kind: Callable[..., Module]) -> Callable[[Any], Module]:
    return lambda args: kind(args, layer_idx=args.num_hidden_layers)


# vLLM: qwen3_5_mtp.py and qwen3_next_mtp.py.
_QWEN: dict[str, Any] = {"promise": "mtp_num_hidden_layers", "pattern": r"(?:.*\.)?mtp\.(.+)", "adds_one": True}
# vLLM: deepseek_mtp.py and glm4_moe_mtp.py. Embedding and output layer are copies of the target's.
_NEXT_N: dict[str, Any] = {
    "promise": "num_nextn_predict_layers",
    "pattern": r"model\.layers\.N\.(.+)",
    "names": {
        "enorm.": "pre_fc_norm_embedding.",
        "hnorm.": "pre_fc_norm_hidden.",
        "eh_proj.": "fc.",
        "shared_head.norm.": "norm.",
        "shared_head.head.": "",
        "embed_tokens.": "",
        "self_attn.rotary_emb.": "",
    },
}
_LAYOUTS: dict[type[Module], HeadLayout] = {
    qwen3_5.DecoderLayer: HeadLayout(make_layer=_qwen_layer(qwen3_5.DecoderLayer), **_QWEN),
    qwen3_next.Qwen3NextDecoderLayer: HeadLayout(make_layer=_qwen_layer(qwen3_next.Qwen3NextDecoderLayer), **_QWEN),
    glm4_moe.DecoderLayer: HeadLayout(make_layer=_layer_behind_all(glm4_moe.DecoderLayer), **_NEXT_N),
    glm4_moe_lite.Glm4MoeLiteDecoderLayer: HeadLayout(
        make_layer=_layer_behind_all(glm4_moe_lite.Glm4MoeLiteDecoderLayer), needs_array=True, **_NEXT_N
    ),
    deepseek_v3.DeepseekV3DecoderLayer: HeadLayout(
        make_layer=_layer_behind_all(deepseek_v3.DeepseekV3DecoderLayer), needs_array=True, **_NEXT_N
    ),
    # vLLM: mimo_mtp.py. The first of several heads says the next token but one.
    mimo.TransformerBlock: HeadLayout(
        promise="num_nextn_predict_layers",
        pattern=r"model\.mtp_layers\.0\.(.+)",
        make_layer=mimo.TransformerBlock,
        names={
            "token_layernorm.": "pre_fc_norm_embedding.",
            "hidden_layernorm.": "pre_fc_norm_hidden.",
            "input_proj.": "fc.",
            "final_layernorm.": "norm.",
            "self_attn.rotary_emb.": "",
        },
        state_first=True,
    ),
}

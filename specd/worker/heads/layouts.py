"""The kinds of MTP heads: the layer that each has, and the names of its tensors in published files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

Tensors = dict[str, mx.array]

# Names that most write, `save_head` too. The group is the name within the head, as in `MTPHead`.
OURS = re.compile(r"(?:.*\.)?mtp\.(.+)")


@dataclass(frozen=True)
class HeadLayout:
    """A kind of head.

    `promise` is the field of a config with the number of heads. `pattern`, in which N stands for the number of the
    target's layers, finds the tensors in the target's files, unless they have the names of OURS; its group is the name
    within the head. `names` maps the beginnings of these names to those of `MTPHead`, the longest first, and "" drops a
    tensor. `make_layer` makes the head's layer, of a class of layers, for a target's arguments. With `state_first`, the
    state comes before the embedding in `fc`. Some layers need a mask as an array. `adds_one` is whether norms multiply
    by 1 + w until a converter adds the 1.
    """

    promise: str
    make_layer: Callable[[Any, Any], Module]
    pattern: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    state_first: bool = False
    needs_array: bool = False
    adds_one: bool = False

    def renamed(self, tensors: Mapping[str, mx.array], network: Any) -> Tensors:
        """Return the head's tensors among those of a target's files, by the names of `MTPHead`, lazily.

        Raises ValueError if mlx-lm cannot convert the head's layer.
        """
        if not self.pattern:
            return {}
        num_layers = len(network.layers)
        pattern = re.compile(r"(?:language_model\.)?" + self.pattern.replace("N", str(num_layers)))
        own = {found[1]: tensor for name, tensor in tensors.items() if (found := pattern.fullmatch(name))}
        if not own:
            return {}
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


def layout_of(network: Any) -> tuple[HeadLayout, Any] | None:
    """Return the layout of a network's head and the class of its layer; None if its heads are not known.

    Classes are found by their names, because a worker imports the module of its own model only.
    """
    layers: Sequence[Module] = getattr(network, "layers", None) or [Module()]
    for kind in type(layers[0]).__mro__:
        layout = _LAYOUTS.get(f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}")
        if layout is not None:
            return layout, kind
    return None


def _as_layer_of(network: Any, tensors: Tensors, number: int) -> Tensors:
    """Let mlx-lm convert a layer as it converts those of the target: experts are stacked, 8-bit floats decoded."""
    prefix, rest = f"model.layers.{number}.", "layers.0."
    if hasattr(network, "language_model"):
        prefix = f"language_model.{prefix}"
    own = {name.replace(rest, prefix, 1): tensor for name, tensor in tensors.items() if name.startswith(rest)}
    try:
        converted = network.sanitize(own)
    except Exception as error:  # experts or latents of another form can cause any error
        raise ValueError(f"mlx-lm cannot convert its layer: {error!r}") from error
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith(rest)}
    return others | {name.replace(prefix, rest, 1): tensor for name, tensor in converted.items()}


def _full_attention_layer(kind: Any, args: Any) -> Module:
    """Make a layer with full attention, and with experts if the model has experts."""
    args = copy(args)
    args.full_attention_interval = args.decoder_sparse_step = 1
    args.mlp_only_layers = []
    layer: Module = kind(args, layer_idx=0)
    return layer


def _layer_behind_all(kind: Any, args: Any) -> Module:
    layer: Module = kind(args, layer_idx=args.num_hidden_layers)
    return layer


def _any_layer(kind: Any, args: Any) -> Module:
    layer: Module = kind(args)
    return layer


# vLLM: qwen3_5_mtp.py and qwen3_next_mtp.py.
_QWEN = HeadLayout("mtp_num_hidden_layers", _full_attention_layer, adds_one=True)
# vLLM: deepseek_mtp.py and glm4_moe_mtp.py. Embedding and output layer are copies of the target's.
_NEXT_N = HeadLayout(
    "num_nextn_predict_layers",
    _layer_behind_all,
    r"model\.layers\.N\.(.+)",
    names={
        "enorm.": "pre_fc_norm_embedding.",
        "hnorm.": "pre_fc_norm_hidden.",
        "eh_proj.": "fc.",
        "shared_head.norm.": "norm.",
        "shared_head.head.": "",
        "embed_tokens.": "",
        "self_attn.rotary_emb.": "",
    },
)
# vLLM: mimo_mtp.py. The first of several heads says the next token but one.
_MIMO = HeadLayout(
    "num_nextn_predict_layers",
    _any_layer,
    r"model\.mtp_layers\.0\.(.+)",
    names={
        "token_layernorm.": "pre_fc_norm_embedding.",
        "hidden_layernorm.": "pre_fc_norm_hidden.",
        "input_proj.": "fc.",
        "final_layernorm.": "norm.",
        "self_attn.rotary_emb.": "",
    },
    state_first=True,
)
# By module and class of mlx-lm's layers.
_LAYOUTS = {
    "qwen3_5.DecoderLayer": _QWEN,
    "qwen3_next.Qwen3NextDecoderLayer": _QWEN,
    "glm4_moe.DecoderLayer": _NEXT_N,
    "glm4_moe_lite.Glm4MoeLiteDecoderLayer": replace(_NEXT_N, needs_array=True),
    "deepseek_v3.DeepseekV3DecoderLayer": replace(_NEXT_N, needs_array=True),
    "mimo.TransformerBlock": _MIMO,
    # `benchmarks/train_head.py` trains such heads.
    "llama.TransformerBlock": replace(_QWEN, make_layer=_any_layer, adds_one=False),
}

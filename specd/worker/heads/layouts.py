"""The kinds of MTP heads, by the layers of their targets."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from importlib import import_module
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.cache import CacheList, KVCache

from specd.worker.heads.head_layout import HeadLayout


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


def _full_attention_layer(kind: Any, args: Any) -> list[Module]:
    """Make a layer with full attention, and with experts if the model has experts."""
    args = copy(args)
    args.full_attention_interval = args.decoder_sparse_step = 1
    args.mlp_only_layers = []
    return [kind(args, layer_idx=0)]


def _layer_behind_all(kind: Any, args: Any) -> list[Module]:
    return [kind(args, args.num_hidden_layers)]


def _any_layer(kind: Any, args: Any) -> list[Module]:
    return [kind(args)]


def _window_layer_of_mimo_v2(kind: Any, args: Any) -> list[Module]:
    return [kind(args, is_moe=False, is_sliding_window=True)]


def _layer_of_exaone(kind: Any, args: Any) -> list[Module]:
    """Make a dense layer with full attention, which has no positions if the target has windows."""
    args, number = copy(args), args.num_hidden_layers
    args.layer_types = [*args.layer_types[:number], "full_attention"]
    args.is_moe_layer = [*args.is_moe_layer[:number], False]
    return _layer_behind_all(kind, args)


def _layer_of_step(kind: Any, args: Any) -> list[Module]:
    """Make a dense layer. The lists of a config describe its attention behind that of the target's layers."""
    args = copy(args)
    args.moe_layers_enum = None
    for name in ("layer_types", "rope_theta"):
        values = getattr(args, name)
        if isinstance(values, list) and len(values) <= args.num_hidden_layers:
            raise ValueError(f"{name} in config.json has {len(values)} items, and none for its layer")
    return _layer_behind_all(kind, args)


def _blocks_of_nemotron(kind: Any, args: Any) -> list[Module]:
    """Make the blocks of all published heads, `mtp_hybrid_override_pattern` "*E": attention, then experts."""
    if not args.n_routed_experts:
        raise ValueError('heads with the blocks "*E" are supported, and the target has no experts')
    return [kind(args, block_type) for block_type in "*E"]


class _LatentLayer(Module):
    """A layer of LongCat-Flash with one attention and without experts. Its lists have the names of the target's."""

    def __init__(self, module: Any, args: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.input_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.self_attn = [module.LongcatFlashMLA(args)]
        self.post_attention_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.mlp = module.LongcatFlashMLP(args)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        x = x + self.self_attn[0](self.input_layernorm(x), mask=mask, cache=cache)
        output: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return output


def _layer_of_longcat(kind: Any, args: Any) -> list[Module]:
    if hasattr(args, "emb_neighbor_num"):
        raise ValueError("the embeddings of a head beside those of n-grams are not known")
    return [_LatentLayer(import_module(kind.__module__), args)]


# vLLM: qwen3_5_mtp.py and qwen3_next_mtp.py.
_QWEN = HeadLayout("mtp_num_hidden_layers", _full_attention_layer, adds_one=True)
# vLLM: deepseek_mtp.py and glm4_moe_mtp.py. Embedding and output layer are copies of the target's. The last three names
# are those of mlx-vlm's splitters.
_NEXT_N = HeadLayout(
    "num_nextn_predict_layers",
    _layer_behind_all,
    r"model\.layers\.N\.(.+)",
    names={
        "enorm.": "pre_fc_norm_embedding.",
        "hnorm.": "pre_fc_norm_hidden.",
        "eh_proj.": "fc.",
        "shared_head.norm.": "norm.",
        "shared_head.": "",
        "embed_tokens.": "",
        "self_attn.rotary_emb.": "",
        "shared_head_norm.": "norm.",
        "mtp_block.": "layers.0.",
        "lm_head.": "",
    },
)
_MLA = replace(_NEXT_N, needs_array=True)
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
# vLLM: mimo_v2_mtp.py. It too uses the first of three heads.
_MIMO_V2 = HeadLayout(
    "num_nextn_predict_layers",
    _window_layer_of_mimo_v2,
    r"model\.mtp\.layers\.0\.(.+)",
    names={
        "enorm.": "pre_fc_norm_embedding.",
        "hnorm.": "pre_fc_norm_hidden.",
        "eh_proj.": "fc.",
        "final_layernorm.": "norm.",
        "pre_mlp_layernorm.": "layers.0.post_attention_layernorm.",
    },
    window=lambda layer, args: args.sliding_window_size,
    eps="layernorm_epsilon",
)
# vLLM: step3p5_mtp.py, of which this is the first of three heads; and step3p5.py, where a state is before the norm.
# The output layer is a copy of the target's (NVIDIA's Megatron Bridge, step35_bridge.py).
_STEP = replace(
    _NEXT_N,
    make_layers=_layer_of_step,
    names={
        "transformer.shared_head.norm.": "norm.",
        "transformer.shared_head.": "",
        **_NEXT_N.names,
    },
    adds_one=True,
    window=lambda layer, args: args.sliding_window if layer.is_sliding else None,
    before_norm=True,
)
# Baidu's FastDeploy, ernie4_5_mtp.py; vLLM's ernie_mtp.py has no last norm.
_ERNIE = HeadLayout(
    "num_nextn_predict_layers",
    _layer_behind_all,
    r"model\.(mtp_.+)",
    names={
        "mtp_emb_norm.0.": "pre_fc_norm_embedding.",
        "mtp_hidden_norm.0.": "pre_fc_norm_hidden.",
        "mtp_linear_proj.0.": "fc.",
        "mtp_block.0.": "layers.0.",
        "mtp_": "",
    },
    shares_norm=True,
)
# vLLM: exaone_moe_mtp.py. K-EXAONE's config has the `mtp_layer_types` ["full_attention"].
_EXAONE = HeadLayout("num_nextn_predict_layers", _layer_of_exaone)
# vLLM: nemotron_h_mtp.py; mlx-vlm: nemotron_h_mtp.
_NEMOTRON = HeadLayout(
    "num_nextn_predict_layers",
    _blocks_of_nemotron,
    names={
        "layers.0.enorm.": "pre_fc_norm_embedding.",
        "layers.0.hnorm.": "pre_fc_norm_hidden.",
        "layers.0.eh_proj.": "fc.",
        "layers.1.final_layernorm.": "norm.",
    },
    eps="layer_norm_epsilon",
)
# vLLM: longcat_flash_mtp.py.
_LONGCAT = HeadLayout(
    "num_nextn_predict_layers",
    _layer_of_longcat,
    r"model\.mtp\.(.+)",
    names={
        "layers.0.enorm.m.": "pre_fc_norm_embedding.",
        "layers.0.hnorm.m.": "pre_fc_norm_hidden.",
        "layers.0.eh_proj.": "fc.",
        "layers.0.self_attn.": "layers.0.self_attn.0.",
        "layers.0.transformer_layer.": "layers.0.",
        "norm.": "norm.",
        "embed_tokens.": "",
    },
    needs_array=True,
)
# By module and class of mlx-lm's layers.
_LAYOUTS = {
    "qwen3_5.DecoderLayer": _QWEN,
    "qwen3_next.Qwen3NextDecoderLayer": _QWEN,
    "glm4_moe.DecoderLayer": _NEXT_N,
    "glm4_moe_lite.Glm4MoeLiteDecoderLayer": _MLA,
    "deepseek_v3.DeepseekV3DecoderLayer": _MLA,
    # The indexer of DeepSeek-V3.2 and GLM-5 has keys of its own.
    "deepseek_v32.DeepseekV32DecoderLayer": replace(_MLA, make_cache=lambda: CacheList(KVCache(), KVCache())),
    # vLLM: bailing_moe_v3_mtp.py.
    "bailing_moe_v3.BailingDecoderLayer": replace(_MLA, names={"final_layernorm.": "norm.", **_NEXT_N.names}),
    "mimo.TransformerBlock": _MIMO,
    "mimo_v2_flash.DecoderLayer": _MIMO_V2,
    "step3p5.Step3p5DecoderLayer": _STEP,
    "ernie4_5_moe.Ernie4_5_DecoderLayer": _ERNIE,
    "exaone_moe.DecoderLayer": _EXAONE,
    "nemotron_h.NemotronHBlock": _NEMOTRON,
    "longcat_flash.LongcatFlashDecoderLayer": _LONGCAT,
}

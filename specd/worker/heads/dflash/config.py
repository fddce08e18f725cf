"""The configuration of a block drafter, in the forms in which such heads are published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.models import qwen3


@dataclass(frozen=True)
class DFlashConfig:
    """The values of a configuration.

    `layer` describes all layers, and `windows` and `is_causal` have a value for each: how many positions a token sees,
    None for all, and whether it sees later tokens of its block. `reads` are the numbers of the target's layers with
    inputs that the head reads. A block has up to `block_size` tokens, and the first is the session's last one;
    `samples_from_anchor` is whether the head drafts a token from its row too. `vocabulary_size` is the number of tokens
    that it knows, and `num_drafted` the number that its own output layer has.
    """

    layer: qwen3.ModelArgs
    windows: Sequence[int | None]
    is_causal: Sequence[bool]
    has_interleaved_angles: bool
    reads: Sequence[int]
    block_size: int
    samples_from_anchor: bool
    mask_token_id: int
    vocabulary_size: int
    num_drafted: int
    markov_rank: int
    selector_rank: int
    selector_top_k: int
    conv_kernel_size: int
    conv_group_size: int
    embedding_scale: float
    output_multiplier: float
    logit_cap: float

    @property
    def most_draft_tokens(self) -> int:
        """The most tokens of a proposal."""
        return self.block_size - (not self.samples_from_anchor)


def parsed(config: Mapping[str, Any]) -> DFlashConfig:
    """Return the values of a configuration.

    Its values are at the top, in `dflash_config`, or in `transformer_layer_config` (vLLM's speculators). Raises
    ValueError, KeyError or TypeError for a head that cannot be used.
    """
    known = {**config, **(config.get("transformer_layer_config") or {}), **(config.get("dflash_config") or {})}
    _refuse_unknown(known)
    layer: qwen3.ModelArgs = qwen3.ModelArgs.from_dict(
        {"model_type": "", "tie_word_embeddings": False, "max_position_embeddings": 0, **known}
    )
    windows = _windows(known, layer.num_hidden_layers)
    parsed = DFlashConfig(
        layer,
        windows,
        _causality(known, windows),
        not known.get("rope_is_neox_style", known.get("is_neox_style", True)),
        _layers_to_read(known),
        int(known["block_size"]),
        _samples_from_anchor(known),
        int(known["mask_token_id"]),
        int(known["vocab_size"]),
        int(known.get("draft_vocab_size") or known["vocab_size"]),
        int(known.get("markov_rank") or 0),
        int(known.get("selector_rank") or 0),
        int(known.get("selector_top_k") or 0),
        int(known.get("conv_kernel_size") or 0),
        int(known.get("conv_group_size") or 1),
        float(known.get("input_embedding_scale", 1)),
        float(known.get("output_multiplier", 1)),
        float(known.get("final_logit_softcapping") or 0),
    )
    if parsed.most_draft_tokens < 1:
        raise ValueError(f"its blocks have {parsed.block_size} tokens, and none is drafted")
    if any(window is not None and window < parsed.block_size for window in windows):
        raise ValueError(f"it has a window that is smaller than its blocks of {parsed.block_size} tokens")
    if layer.hidden_size % parsed.conv_group_size:
        raise ValueError(f"conv_group_size {parsed.conv_group_size} does not divide hidden_size {layer.hidden_size}")
    if parsed.markov_rank and parsed.selector_rank:
        raise ValueError("it has a Markov head and a candidate selector, and one of them is supported")
    return parsed


def _refuse_unknown(known: Mapping[str, Any]) -> None:
    supported = {
        "hidden_act": ("silu", None),
        "hidden_activation": ("silu", None),
        "projector_type": ("dflash", "dflash2", "dspark", None),
        "markov_head_type": ("vanilla", None),
        "enable_qwen35_gated_q_proj": (False, None),
        "shift_label": (False, None),
    }
    for name, values in supported.items():
        if known.get(name) not in values:
            raise ValueError(f"its {name} is {known[name]}, and {values[0]} is supported")


def _windows(known: Mapping[str, Any], num_layers: int) -> Sequence[int | None]:
    """Return the window of each layer, as vLLM's qwen3_dflash.py finds it."""
    types = known.get("layer_types") or ["full_attention"] * num_layers
    if len(types) != num_layers or not {*types} <= {"full_attention", "sliding_attention"}:
        raise ValueError(f"it has {num_layers} layers, and its layer_types are {types}")
    has_window = [each == "sliding_attention" for each in types]
    if known.get("use_swa") and not any(has_window):
        has_window = [True] * num_layers
    window = known.get("swa_window_size") or known.get("sliding_window")
    if any(has_window) and window is None:
        raise ValueError("its layers have a window, and sliding_window is missing")
    return [int(window) if has and window is not None else None for has in has_window]


def _causality(known: Mapping[str, Any], windows: Sequence[int | None]) -> Sequence[bool]:
    """Return for each layer whether it is causal within a block: those with a window are, unless the config says."""
    for name in ("is_causal", "causal", "dflash_query_causal"):
        if known.get(name) is not None:
            return [bool(known[name])] * len(windows)
    return [window is not None and not known.get("sliding_window_non_causal") for window in windows]


def _layers_to_read(known: Mapping[str, Any]) -> Sequence[int]:
    """Return the numbers of the target's layers with inputs that the head reads.

    `target_layer_ids` number layers by their outputs, as in z-lab's `extract_context_feature`. Those of speculators
    number them by their inputs (vLLM's issue 40727).
    """
    if (ids := known.get("aux_hidden_state_layer_ids")) is not None:
        return [int(i) for i in ids]
    return [int(i) + 1 for i in known["target_layer_ids"]]


def _samples_from_anchor(known: Mapping[str, Any]) -> bool:
    """Return whether the first row of a block drafts a token: in DSpark it does, unless the config says otherwise.

    The default is that of SGLang's `get_dspark_sample_from_anchor`; in speculators it is the opposite.
    """
    if known.get("sample_from_anchor") is not None:
        return bool(known["sample_from_anchor"])
    is_other = known.get("dspark_bonus_anchor") or "speculators_model_type" in known
    return bool(known.get("markov_rank")) and not is_other

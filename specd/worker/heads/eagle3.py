"""EAGLE-3 and 3.1: a layer over the hidden states of several layers of the target.

The paper is arXiv:2503.01840. The files are those of its authors and SGLang (`midlayer.*`), and of vLLM's speculators
(`layers.0.*`), after vLLM's llama_eagle3.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask

from specd.worker.engine.forward import let_attention_take_batches
from specd.worker.heads.hidden import HiddenStates
from specd.worker.heads.kind import HeadKind, Tensors
from specd.worker.heads.pair_head import PairHead
from specd.worker.heads.row_map import RowMap

# Tensors that no pass reads: a mask of the head's vocabulary, copies of the target's own, tables of angles.
_UNREAD = re.compile(r"t2d|verifier_.*|.*rotary_emb\..*")


class _Layer(Module):
    """A layer with attention over the embedding of a token beside a state."""

    def __init__(self, args: llama.ModelArgs, *, norm_before_residual: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._norm_before_residual = norm_before_residual
        self.self_attn = llama.Attention(args)
        for name in ("q_proj", "k_proj", "v_proj"):
            num_outputs = getattr(self.self_attn, name).weight.shape[0]
            setattr(self.self_attn, name, Linear(2 * args.hidden_size, num_outputs, bias=args.attention_bias))
        self.mlp = llama.MLP(args)
        self.input_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.hidden_norm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)

    def __call__(self, embeddings: mx.array, states: mx.array, mask: Any, cache: Any) -> mx.array:
        normed = self.hidden_norm(states)
        pairs = mx.concatenate([self.input_layernorm(embeddings), normed], axis=-1)
        x = (normed if self._norm_before_residual else states) + self.self_attn(pairs, mask, cache)
        output: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return output


class Eagle3Head(PairHead):
    """One layer over pairs of a fused state and the token that follows it.

    `fc` fuses the hidden states of several layers of the target. The head's own states continue a chain; `d2t` maps
    the ids of its smaller vocabulary to the target's, by their difference.
    """

    def __init__(self, config: Mapping[str, Any], network: Any, names: Collection[str]) -> None:
        """Make a head for a network, with random weights. Raises ValueError for a form that is not known."""
        layer = {**config, **(config.get("transformer_layer_config") or {})}
        if layer.get("num_hidden_layers", 1) != 1:
            raise ValueError(f"it has {layer['num_hidden_layers']} layers, and one is supported")
        args = _arguments(layer)
        states = HiddenStates(network, _layers_to_read(config, len(network.layers)))
        super().__init__(states, args.hidden_size)
        of_eagle: Mapping[str, Any] = {**config, **(config.get("eagle_config") or {})}
        num_states = len(states.layers)
        size_of_target = states.size // num_states
        self._window = layer.get("sliding_window") if "sliding_attention" in (layer.get("layer_types") or ()) else None
        self._feeds_normed = bool(of_eagle.get("norm_output"))
        if "embed_tokens.weight" in names or args.hidden_size != size_of_target:
            self.embed_tokens = Embedding(layer["vocab_size"], args.hidden_size)
        if of_eagle.get("norm_before_fc"):
            self.input_norm = RMSNorm(states.size, args.rms_norm_eps)
        if of_eagle.get("fc_norm"):
            self.fc_norm = [RMSNorm(size_of_target, args.rms_norm_eps) for _ in range(num_states)]
        self.fc = Linear(states.size, args.hidden_size, bias="fc.bias" in names)
        self.layers = [_Layer(args, norm_before_residual=bool(of_eagle.get("norm_before_residual")))]
        self.norm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self._num_rows = states.logits(states.embed(mx.array([0]))).shape[-1]
        num_drafted = config.get("draft_vocab_size") or layer["vocab_size"]
        if "lm_head.weight" in names:
            self.lm_head = Linear(args.hidden_size, num_drafted, bias=False)
        if "d2t" in names:
            self.d2t = mx.zeros(num_drafted, mx.int64)
        elif num_drafted > self._num_rows:
            raise ValueError(f"it drafts {num_drafted} tokens, and the target has {self._num_rows}")
        self._row_map: RowMap | None = None
        let_attention_take_batches(self)

    def fuse(self, hidden: mx.array) -> mx.array:
        """Return the states [n, size] that the head reads, of the target's hidden states [n, states.size]."""
        if "fc_norm" in self:
            parts = mx.split(hidden, len(self.fc_norm), axis=-1)
            hidden = mx.concatenate([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], axis=-1)
        if "input_norm" in self:
            hidden = self.input_norm(hidden)
        fused: mx.array = self.fc(hidden.astype(self.states.dtype))
        return fused

    def __call__(self, token_ids: mx.array, hidden: mx.array, cache: Sequence[Any]) -> mx.array:
        """See `PairHead`."""
        embeddings = self.embed_tokens(token_ids) if "embed_tokens" in self else self.states.embed(token_ids)
        mask = create_attention_mask(hidden, cache[0], window_size=self._window)
        states: mx.array = self.layers[0](embeddings, hidden.astype(embeddings.dtype), mask, cache[0])
        return self.norm(states) if self._feeds_normed else states

    def logits(self, states: mx.array) -> mx.array:
        """Return the logits [..., rows] of the head's states [..., size], with the target's rows."""
        normed = states if self._feeds_normed else self.norm(states)
        logits: mx.array = self.lm_head(normed) if "lm_head" in self else self.states.logits(normed)
        if "d2t" not in self and logits.shape[-1] == self._num_rows:
            return logits
        if self._row_map is None:
            own = mx.arange(logits.shape[-1])
            self._row_map = RowMap(self._num_rows, own + self.d2t if "d2t" in self else own)
        return self._row_map(logits)


def _arguments(layer: Mapping[str, Any]) -> llama.ModelArgs:
    rope = dict(layer.get("rope_parameters") or {})
    known = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    if rope.get("rope_type", "default") != "default":
        known["rope_scaling"] = rope
    args: llama.ModelArgs = llama.ModelArgs.from_dict({"tie_word_embeddings": False, **layer, **known})
    return args


def _layers_to_read(config: Mapping[str, Any], num_layers: int) -> Sequence[int]:
    """Return the numbers of the layers of the target with inputs that the head reads.

    Ids that begin with 1 number the layers by their outputs, others by their inputs (SGLang's pull request 25454).
    """
    of_eagle: Mapping[str, Any] = config.get("eagle_config") or {}
    name = "eagle_aux_hidden_state_layer_ids"
    ids = of_eagle.get(name) or config.get(name)
    if ids is None:
        return [2, num_layers // 2, num_layers - 3]
    return [i + 1 for i in ids] if ids[0] == 1 else list(ids)


def _renamed(tensors: Tensors) -> Tensors:
    """Return the tensors by the names of `Eagle3Head`."""
    named = {name.removeprefix("model.").replace("midlayer.", "layers.0."): each for name, each in tensors.items()}
    return {name: each for name, each in named.items() if not _UNREAD.fullmatch(name)}


KIND = HeadKind(Eagle3Head, _renamed)

"""A head that predicts the token after the next one (multi-token prediction)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import CacheList

from specd.worker.heads.hidden import HiddenStates
from specd.worker.heads.layouts import layout_of
from specd.worker.heads.pair_head import PairHead


class MTPHead(PairHead):
    """Layers of the target's family over pairs of a hidden state and the token that follows it. One has attention.

    The states are those behind the last norm, the target's and the head's own: in vLLM (`layouts.py` names the files),
    in mlx-vlm (qwen3_5_mtp), and in llama.cpp since its pull request 24025, where this accepted more tokens than states
    before the norm. In Step 3.5 they are those before it. The embedding comes first in `fc`.
    """

    def __init__(self, network: Any, states: HiddenStates) -> None:
        """Make a head for a network, with random weights. Raises ValueError if its family has no known head."""
        super().__init__(states)
        known = layout_of(network)
        if known is None:
            raise ValueError("no kind of head is known for its family")
        layout, kind = known
        args = getattr(network, "language_model", network).args
        size, eps = args.hidden_size, getattr(args, layout.eps)
        self._layout = layout
        self._has_parts = isinstance(layout.make_cache(), CacheList)
        self.pre_fc_norm_embedding = RMSNorm(size, eps)
        self.pre_fc_norm_hidden = RMSNorm(size, eps)
        self.fc = Linear(2 * size, size, bias=False)
        self.layers = layout.make_layers(kind, args)
        self._window = layout.window(self.layers[0], args)
        if not layout.shares_norm:
            self.norm = RMSNorm(size, eps)

    def make_cache(self) -> list[Any]:
        """Return an empty cache of mlx-lm, of the layer with attention, from which `SessionLayers` makes its own."""
        return [self._layout.make_cache()]

    def __call__(self, token_ids: mx.array, hidden: mx.array, cache: Sequence[Any]) -> mx.array:
        """See `PairHead`."""
        embeddings = self.pre_fc_norm_embedding(self.states.embed(token_ids))
        hidden = hidden.astype(embeddings.dtype)  # beside float32 logits, a state has their type
        x = self.fc(mx.concatenate([embeddings, self.pre_fc_norm_hidden(hidden)], axis=-1))
        (of_attention,) = cache
        keys = of_attention[0] if self._has_parts and of_attention is not None else of_attention
        mask = create_attention_mask(x, keys, window_size=self._window, return_array=self._layout.needs_array)
        for layer in self.layers:
            x = layer(x, mask=mask, cache=of_attention)
        return x if self._layout.before_norm else self._normed(x)

    def logits(self, states: mx.array) -> mx.array:
        """Return the logits [..., rows] of the head's own states [..., size]."""
        return self.states.logits(self._normed(states) if self._layout.before_norm else states)

    def _normed(self, x: mx.array) -> mx.array:
        normed: mx.array = self.norm(x) if "norm" in self else self.states.norm(x)
        return normed

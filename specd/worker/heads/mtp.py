"""A head that predicts the token after the next one (multi-token prediction)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.base import create_attention_mask

from specd.worker.heads.hidden import HiddenStates
from specd.worker.heads.layouts import layout_of
from specd.worker.heads.pair_head import PairHead


class MTPHead(PairHead):
    """One layer of the target's family over pairs of a hidden state and the token that follows it.

    The states are those behind the last norm, the target's and the head's own: in vLLM (`layouts.py` names the files),
    in mlx-vlm (qwen3_5_mtp), and in llama.cpp since its pull request 24025, where this accepted more tokens than states
    before the norm. The embedding comes first in `fc`.
    """

    def __init__(self, network: Any, states: HiddenStates) -> None:
        """Make a head for a network, with random weights. Raises ValueError if its family has no known head."""
        super().__init__(states)
        known = layout_of(network)
        if known is None:
            raise ValueError("no kind of head is known for its family")
        layout, kind = known
        args = getattr(network, "language_model", network).args
        size, eps = args.hidden_size, args.rms_norm_eps
        self._needs_array = layout.needs_array
        self.pre_fc_norm_embedding = RMSNorm(size, eps)
        self.pre_fc_norm_hidden = RMSNorm(size, eps)
        self.fc = Linear(2 * size, size, bias=False)
        self.layers = [layout.make_layer(kind, args)]
        self.norm = RMSNorm(size, eps)

    def __call__(self, token_ids: mx.array, hidden: mx.array, cache: Sequence[Any]) -> mx.array:
        """See `PairHead`."""
        embeddings = self.pre_fc_norm_embedding(self.states.embed(token_ids))
        hidden = hidden.astype(embeddings.dtype)  # beside float32 logits, a state has their type
        x = self.fc(mx.concatenate([embeddings, self.pre_fc_norm_hidden(hidden)], axis=-1))
        mask = create_attention_mask(x, cache[0], return_array=self._needs_array)
        for layer, of_layer in zip(self.layers, cache, strict=True):
            x = layer(x, mask=mask, cache=of_layer)
        states: mx.array = self.norm(x)
        return states

"""The head of Qwen3-Next, Qwen3.5, 3.6 and 3.8 that predicts the token after the next one (multi-token prediction)."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models import qwen3_5, qwen3_next
from mlx_lm.models.base import create_attention_mask

from specd.worker.heads.head import Head
from specd.worker.heads.hidden import HiddenStates

# mlx-lm's decoder layers of the families with such heads, dense and with experts.
_LAYERS = (qwen3_5.DecoderLayer, qwen3_next.Qwen3NextDecoderLayer)


class MTPHead(Head):
    """One layer with full attention over pairs of a hidden state and the token that follows it.

    The states are those behind the last norm, the target's and the head's own: in vLLM (qwen3_5_mtp.py and
    qwen3_next_mtp.py), in mlx-vlm (qwen3_5_mtp), and in llama.cpp since its pull request 24025, where this accepted
    more tokens than states before the norm. The embedding comes first in `fc`.
    """

    def __init__(self, network: Module, states: HiddenStates) -> None:
        """Make a head for a network, with random weights. Raises ValueError if its family has no such head."""
        super().__init__(states)
        text: Any = getattr(network, "language_model", network)
        layers: Any = getattr(network, "layers", None) or [None]
        kind: Any = next((kind for kind in _LAYERS if isinstance(layers[0], kind)), None)
        if kind is None:
            raise ValueError(f"heads for {type(text).__module__.rpartition('.')[2]} are not known")
        args = copy(text.args)
        # The only layer of the head has full attention, and experts if the model has experts.
        args.full_attention_interval = args.decoder_sparse_step = 1
        args.mlp_only_layers = []
        size, eps = args.hidden_size, args.rms_norm_eps
        self.pre_fc_norm_embedding = RMSNorm(size, eps)
        self.pre_fc_norm_hidden = RMSNorm(size, eps)
        self.fc = Linear(2 * size, size, bias=False)
        self.layers = [kind(args, layer_idx=0)]
        self.norm = RMSNorm(size, eps)

    def __call__(self, token_ids: mx.array, hidden: mx.array, cache: Sequence[Any]) -> mx.array:
        """See `Head`."""
        embeddings = self.pre_fc_norm_embedding(self.states.embed(token_ids))
        x = self.fc(mx.concatenate([embeddings, self.pre_fc_norm_hidden(hidden)], axis=-1))
        mask = create_attention_mask(x, cache[0])
        for layer, of_layer in zip(self.layers, cache, strict=True):
            x = layer(x, mask=mask, cache=of_layer)
        states: mx.array = self.norm(x)
        return states

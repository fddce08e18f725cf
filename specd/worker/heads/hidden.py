"""The hidden states from which a network computes its logits, without a change to mlx-lm's networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module


class HiddenStates:
    """A network's passes with their hidden states, and its two ends: the embedding and the output layer.

    A hidden state is the input of the output layer, so it is behind the last norm. The output layer is
    `lm_head`, or the embedding where the two share their weights (`as_linear`). Create the object after the last
    replacement of the network's layers.
    """

    def __init__(self, network: Module) -> None:
        """Find both ends. Raises ValueError if the network does not have them under mlx-lm's usual names."""
        named = {name.rpartition(".")[2]: part for name, part in network.named_modules()}
        if "embed_tokens" not in named:
            raise ValueError("the network has no embed_tokens")
        self._network = network
        self._call = type(network).__call__
        self.embedding: Any = named["embed_tokens"]
        is_tied = "lm_head" not in named
        self._layer: Any = self.embedding if is_tied else named["lm_head"]
        self._plain: Any = type(self._layer)
        method = "as_linear" if is_tied else "__call__"
        self._project = getattr(self._plain, method)
        self._inputs: list[mx.array] = []
        embedded = self.embed(mx.array([0]))
        self.size, self.dtype = embedded.shape[-1], embedded.dtype  # of a hidden state

        def recorded(layer: Module, hidden: mx.array) -> mx.array:
            self._inputs.append(hidden)
            return self.logits(hidden)

        self._recording = type(self._plain.__name__, (self._plain,), {method: recorded})

    def run(self, token_ids: mx.array, cache: Sequence[Any]) -> tuple[mx.array, mx.array]:
        """Return the logits [..., rows] and the hidden states [..., size] of a pass over token ids, lazily.

        The ids are [1, n] for one session, or [tokens, 1] for several (forward.py). A prefill evaluates the caches and
        the hidden states alone: MLX then never computes the logits.

        A compiled function traces the network once, and a hidden state is a placeholder while it does. So the function
        must call `run` inside, and return the hidden states as an output: see `attach`.
        """
        self._layer.__class__ = self._recording
        try:
            logits: mx.array = self._call(self._network, token_ids, cache=cache)
            (hidden,) = self._inputs
        finally:
            self._layer.__class__ = self._plain
            self._inputs.clear()
        return logits, hidden

    def attach(self) -> None:
        """Let the network itself return both [..., rows + size], the hidden states behind the logits.

        So every form of a pass returns them: batches, compiled passes and shared ones slice rows, whatever they hold.
        """
        run, plain = self.run, type(self._network)

        def both(network: Module, token_ids: mx.array, cache: Sequence[Any]) -> mx.array:
            return mx.concatenate([*run(token_ids, cache)], axis=-1)

        self._network.__class__ = type(plain.__name__, (plain,), {"__call__": both})
        self._network.without_logits = lambda token_ids, cache: run(token_ids, cache)[1]

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether the network's attention reads whole buffers."""
        return getattr(self._network, "fixed_shapes", False)

    def embed(self, token_ids: mx.array) -> mx.array:
        """Return the embeddings [..., size] of token ids [...]."""
        embeddings: mx.array = self.embedding(token_ids)
        return embeddings

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the output layer's logits [..., rows] of hidden states [..., size]."""
        logits: mx.array = self._project(self._layer, hidden)
        return logits

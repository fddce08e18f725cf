"""The hidden states from which a network computes its logits, without a change to mlx-lm's networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

# The names of the embedding, of which a network has one.
_EMBEDDINGS = ("embed_tokens", "embeddings", "word_embeddings")


class HiddenStates:
    """A network's passes with their hidden states, and its two ends: the embedding and the output layer.

    A hidden state is the input of the output layer, so it is behind the last norm; or, with `before_norm`, the input of
    this norm; or, with `layers`, the inputs of the layers with these numbers, one behind the other. The number behind
    the last stands for the output of the last layer. The output layer is `lm_head`, or the embedding where the two
    share their weights (`as_linear`). Create the object after the last replacement of the network's layers.
    """

    def __init__(self, network: Any, layers: Sequence[int] = (), *, before_norm: bool = False) -> None:
        """Find both ends and the layers. Raises ValueError if the network has no such layers, or other names."""
        named = {name.rpartition(".")[2]: part for name, part in network.named_modules()}
        embedding = next((named[name] for name in _EMBEDDINGS if name in named), None)
        if embedding is None:
            raise ValueError("the network has no embed_tokens")
        self.network = network
        self.layers = layers
        self._call = type(network).__call__
        self.embedding: Any = embedding
        is_tied = "lm_head" not in named
        self._layer: Any = self.embedding if is_tied else named["lm_head"]
        self._plain: Any = type(self._layer)
        method = "as_linear" if is_tied else "__call__"
        self._project = getattr(self._plain, method)
        self._cap = _cap_of(network)
        self._passed: dict[int, tuple[mx.array, Any]] = {}  # the input and the output, by the id of the module
        embedded = self.embed(mx.array([0]))
        self.dtype = embedded.dtype
        self.size = embedded.shape[-1] * (len(layers) or 1)  # of a hidden state

        # The modules that record, their classes, and classes that record.
        self._recorded = [(self._layer, self._plain, self._recording(self._plain, method))]
        if layers:
            last = len(network.layers) - 1
            if missing := [i for i in layers if not 0 <= i <= last + 1]:
                raise ValueError(f"the network has {last + 1} layers, and none with the number {missing[0]}")
            named_layers = [network.layers[min(i, last)] for i in layers]
            self._recorded = [(each, type(each), self._recording(type(each), "__call__")) for each in named_layers]
        self._reads_output = [i == len(network.layers) for i in layers] or [False]
        self.norm: Any = getattr(getattr(network, "model", None), "norm", None)  # the last one
        self._before_norm = before_norm
        if before_norm:
            self._recorded = [(self.norm, type(self.norm), self._recording(type(self.norm), "__call__"))]

    def run(self, token_ids: mx.array, cache: Sequence[Any]) -> tuple[mx.array, mx.array]:
        """Return the logits [..., rows] and the hidden states [..., size] of a pass over token ids, lazily.

        The ids are [1, n] for one session, or [tokens, 1] for several (forward.py). A prefill evaluates the caches and
        the hidden states alone: MLX then never computes the logits.

        A compiled function traces the network once, and a hidden state is a placeholder while it does. So the function
        must call `run` inside, and return the hidden states as an output: see `attach`.
        """
        for part, _, recording in self._recorded:
            part.__class__ = recording
        try:
            logits: mx.array = self._call(self.network, token_ids, cache=cache)
            recorded = zip(self._recorded, self._reads_output, strict=True)
            states = [self._passed[id(part)][reads_output] for (part, _, _), reads_output in recorded]
            hidden = states[0] if len(states) == 1 else mx.concatenate(states, axis=-1)
        finally:
            for part, plain, _ in self._recorded:
                part.__class__ = plain
            self._passed.clear()
        return logits, hidden

    def _recording(self, plain: Any, method: str) -> Any:
        """Return a class of modules that also records the inputs and outputs of a method."""
        call = getattr(plain, method)

        def recorded(part: Module, hidden: mx.array, *args: Any, **options: Any) -> Any:
            output = call(part, hidden, *args, **options)
            self._passed[id(part)] = hidden, output
            return output

        return type(plain.__name__, (plain,), {method: recorded})

    def attach(self) -> None:
        """Let the network itself return both [..., rows + size], the hidden states behind the logits.

        So every form of a pass returns them: batches, compiled passes and shared ones slice rows, whatever they hold.
        """
        run, plain = self.run, type(self.network)

        def both(network: Module, token_ids: mx.array, cache: Sequence[Any]) -> mx.array:
            return mx.concatenate([*run(token_ids, cache)], axis=-1)

        self.network.__class__ = type(plain.__name__, (plain,), {"__call__": both})
        self.network.without_logits = lambda token_ids, cache: run(token_ids, cache)[1]

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether the network's attention reads whole buffers."""
        return getattr(self.network, "fixed_shapes", False)

    def embed(self, token_ids: mx.array) -> mx.array:
        """Return the embeddings [..., size] of token ids [...]."""
        embeddings: mx.array = self.embedding(token_ids)
        return embeddings

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the network's logits [..., rows] of hidden states [..., size], by its output layer and its cap."""
        logits: mx.array = self._project(self._layer, hidden)
        return logits if self._cap is None else mx.tanh(logits / self._cap) * self._cap

    def logits_of_target(self, hidden: mx.array) -> mx.array:
        """Return the network's logits [..., rows] of its own hidden states [..., size]."""
        return self.logits(self.norm(hidden) if self._before_norm else hidden)


def _cap_of(network: Module) -> float | None:
    """Return the bound c of a network with the logits c * tanh(x / c) for the outputs x of its output layer."""
    caps = (getattr(part, "final_logit_softcapping", None) for part in network.modules())
    return next((cap for cap in caps if cap is not None), None)

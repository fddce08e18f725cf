"""The sizes and variants of a T5."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import mlx.core as mx
from mlx import nn

# By `feed_forward_proj`. transformers uses two GELUs: with a gate the approximation by tanh (gelu_new), else erf.
ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "relu": nn.relu,
    "gelu": nn.gelu,
    "silu": nn.silu,
    "gated-relu": nn.relu,
    "gated-gelu": nn.gelu_approx,
    "gated-silu": nn.silu,
}


@dataclass
class Arguments:
    """The fields of config.json that the network needs, by transformers' names.

    v1.0 (Raffel et al., arXiv 1910.10683) has a ReLU between two matrices, and multiplies the decoder's output by
    d_model^-0.5 before the embedding, which is also its output layer. v1.1, FLAN, mT5 and UL2 have a gated activation
    (Shazeer, arXiv 2002.05202), an output layer of their own, and no factor.
    """

    model_type: str
    vocab_size: int
    d_model: int
    d_kv: int
    d_ff: int
    num_layers: int
    num_heads: int
    num_decoder_layers: int = 0  # as many as num_layers
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    feed_forward_proj: str = "relu"
    tie_word_embeddings: bool = True
    scale_decoder_outputs: bool | None = None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Use the fields of config.json that exist here. Raises ValueError for an unknown activation."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in config.items() if name in names and value is not None})

    def __post_init__(self) -> None:
        if self.feed_forward_proj not in ACTIVATIONS:
            raise ValueError(
                f"feed_forward_proj is {self.feed_forward_proj!r}, but it must be one of {', '.join(ACTIVATIONS)}"
            )
        self.num_decoder_layers = self.num_decoder_layers or self.num_layers

    @property
    def is_gated(self) -> bool:
        """Whether the activation is multiplied by a second projection."""
        return self.feed_forward_proj.startswith("gated-")

    @property
    def activation(self) -> Callable[[mx.array], mx.array]:
        """The activation function."""
        return ACTIVATIONS[self.feed_forward_proj]

    @property
    def output_factor(self) -> float:
        """The factor of the decoder's output before the output layer.

        transformers 5 writes `tie_word_embeddings: true` for models with an output layer of their own, beside
        `scale_decoder_outputs: false`; older versions do not write the latter.
        """
        scales = self.scale_decoder_outputs
        if scales is None:
            scales = self.tie_word_embeddings and self.model_type != "mt5"
        return self.d_model**-0.5 if scales else 1.0

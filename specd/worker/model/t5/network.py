"""The network of a T5: an encoder that reads the source once, and a decoder that attends to the encoded source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import scaled_dot_product_attention

from specd.worker.model.t5 import weights
from specd.worker.model.t5.arguments import Arguments
from specd.worker.model.t5.caches import DecoderCache, SourceCache
from specd.worker.model.t5.relative_positions import RelativePositions

# The most attention weights of a head in the encoder at once: 1,024 tokens that see each other, or fewer of a longer
# source.
_MOST_WEIGHTS = 2**20


class Attention(nn.Module):
    """Attention without a scale, and without biases in the projections."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        size = args.num_heads * args.d_kv
        self._num_heads = args.num_heads
        self.q = nn.Linear(args.d_model, size, bias=False)
        self.k = nn.Linear(args.d_model, size, bias=False)
        self.v = nn.Linear(args.d_model, size, bias=False)
        self.o = nn.Linear(size, args.d_model, bias=False)

    def keys_and_values(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Return keys and values [batch, heads, n, d_kv] for x [batch, n, d_model]."""
        return self._heads(self.k(x)), self._heads(self.v(x))

    def __call__(self, x: mx.array, keys: Any, values: Any, mask: Any, cache: Any = None) -> mx.array:
        """Return [batch, n, d_model]; the mask is added to the weights."""
        attended = scaled_dot_product_attention(self._heads(self.q(x)), keys, values, cache=cache, scale=1.0, mask=mask)
        batch, n, _ = x.shape
        output: mx.array = self.o(attended.swapaxes(1, 2).reshape(batch, n, -1))
        return output

    def _heads(self, x: mx.array) -> mx.array:
        batch, n, _ = x.shape
        return x.reshape(batch, n, self._num_heads, -1).swapaxes(1, 2)


class FeedForward(nn.Module):
    """Two matrices with an activation between them, or three matrices, one of which is the gate."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._activation = args.activation
        if args.is_gated:
            self.wi_0 = nn.Linear(args.d_model, args.d_ff, bias=False)
            self.wi_1 = nn.Linear(args.d_model, args.d_ff, bias=False)
        else:
            self.wi = nn.Linear(args.d_model, args.d_ff, bias=False)
        self.wo = nn.Linear(args.d_ff, args.d_model, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """Return [batch, n, d_model]."""
        hidden = self._activation(self.wi_0(x)) * self.wi_1(x) if "wi_0" in self else self._activation(self.wi(x))
        output: mx.array = self.wo(hidden)
        return output


class EncoderLayer(nn.Module):
    """Attention of all tokens to all tokens."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.attention = Attention(args)
        self.attention_norm = nn.RMSNorm(args.d_model, args.layer_norm_epsilon)
        self.feed_forward = FeedForward(args)
        self.feed_forward_norm = nn.RMSNorm(args.d_model, args.layer_norm_epsilon)

    def keys_and_values(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Return keys and values [1, heads, n, d_kv] of all tokens, for x [1, n, d_model]."""
        return self.attention.keys_and_values(self.attention_norm(x))

    def __call__(self, x: mx.array, keys: mx.array, values: mx.array, biases: mx.array) -> mx.array:
        """Return [1, n, d_model] for some of the tokens."""
        x = x + self.attention(self.attention_norm(x), keys, values, biases)
        return x + self.feed_forward(self.feed_forward_norm(x))


class DecoderLayer(nn.Module):
    """Attention to the earlier tokens, then to the source."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.attention = Attention(args)
        self.attention_norm = nn.RMSNorm(args.d_model, args.layer_norm_epsilon)
        self.cross_attention = Attention(args)
        self.cross_attention_norm = nn.RMSNorm(args.d_model, args.layer_norm_epsilon)
        self.feed_forward = FeedForward(args)
        self.feed_forward_norm = nn.RMSNorm(args.d_model, args.layer_norm_epsilon)

    def __call__(self, x: mx.array, biases: Any, no_mask: Any, cache: Any) -> mx.array:
        """Return [batch, n, d_model]; `cache` has one part for each attention."""
        own, source = cache[0], cache[1]
        normed = self.attention_norm(x)
        keys, values = own.update_and_fetch(*self.attention.keys_and_values(normed))
        x = x + self.attention(normed, keys, values, biases, own)
        keys, values = source.keys_and_values()
        x = x + self.cross_attention(self.cross_attention_norm(x), keys, values, no_mask, source)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Encoder(nn.Module):
    """The encoder's layers."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers = [EncoderLayer(args) for _ in range(args.num_layers)]
        self.relative_positions = RelativePositions(args, is_causal=False)
        self.norm = nn.RMSNorm(args.d_model, args.layer_norm_epsilon)


class T5(nn.Module):
    """A T5. To a worker, the decoder is a network like any other, with caches that also hold a source."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._args = args
        self.shared = nn.Embedding(args.vocab_size, args.d_model)
        self.encoder = Encoder(args)
        self.layers = [DecoderLayer(args) for _ in range(args.num_decoder_layers)]
        self.relative_positions = RelativePositions(args, is_causal=True)
        self.norm = nn.RMSNorm(args.d_model, args.layer_norm_epsilon)

    def make_cache(self) -> list[tuple[DecoderCache, SourceCache]]:
        """Return the two caches of each layer."""
        return [(DecoderCache(), SourceCache()) for _ in self.layers]

    def encode(self, source: mx.array) -> Iterator[mx.array]:
        """Yield arrays to evaluate one after the other for a source [1, n]; the last is the encoded source.

        Every token sees all others, so each layer must be computed for all tokens before the next layer. A layer is
        computed for a bounded number of tokens at a time, so that the attention weights of a long source need little
        memory. Each part is a step of the engine, so that other sessions' steps can run in between.
        """
        n = source.shape[1]
        rows = max(_MOST_WEIGHTS // n, 1)
        biases = self.encoder.relative_positions(0, n, n) if rows >= n else None
        x = self.shared(source)
        for layer in self.encoder.layers:
            keys, values = layer.keys_and_values(x)
            parts = []
            for begin in range(0, n, rows):
                part = x[:, begin : begin + rows]
                own = self.encoder.relative_positions(begin, part.shape[1], n) if biases is None else biases
                parts.append(layer(part, keys, values, own))
                yield parts[-1]
            x = mx.concatenate(parts, axis=1)
        yield self.encoder.norm(x)

    def read(self, encoded: mx.array, caches: Sequence[Any]) -> None:
        """Give the decoder's layers their keys and values of an encoded source."""
        for layer, cache in zip(self.layers, caches, strict=True):
            cache[1].hold(*layer.cross_attention.keys_and_values(encoded))

    def __call__(self, inputs: mx.array, cache: Sequence[Any]) -> mx.array:
        """Return the logits [batch, n, vocab_size] after tokens [batch, n] of the answer."""
        first, source = cache[0][0], cache[0][1]
        n = inputs.shape[1]
        biases = first.make_mask(n, biases=self.relative_positions)
        no_mask = source.make_mask(n)
        x = self.shared(inputs)
        for layer, own in zip(self.layers, cache, strict=True):
            x = layer(x, biases, no_mask, own)
        x = self.norm(x)
        if (factor := self._args.output_factor) != 1.0:
            x = factor * x
        logits: mx.array = self.lm_head(x) if "lm_head" in self else self.shared.as_linear(x)
        return logits

    def sanitize(self, named: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights by our names, and create an output layer if the weights have one."""
        ours = weights.renamed(named)
        if "lm_head.weight" in ours:
            self.lm_head = nn.Linear(self._args.d_model, self._args.vocab_size, bias=False)
        return ours

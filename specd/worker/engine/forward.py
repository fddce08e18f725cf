"""One forward pass over tokens of several sessions, each with a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import accumulate
from typing import Any, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module

from specd.worker.cache.layers.session_layers import SessionLayers
from specd.worker.cpu.network import replace_function
from specd.worker.cpu.streams import share_sessions, using_cores


class Cache(Protocol):
    """A session's cache."""

    @property
    def network(self) -> Module:
        """The model that it is of."""

    @property
    def layers(self) -> SessionLayers:
        """The caches of its layers."""

    @property
    def batches(self) -> bool:
        """True if the model can compute several sessions in one pass."""


@dataclass(frozen=True, eq=False)
class BareCache:
    """A cache of no session, to try a model with."""

    network: Module
    layers: SessionLayers
    batches: bool


@dataclass(frozen=True, eq=False)
class Feed:
    """Tokens [n] that a session's cache is to take in next.

    `wants_logits` is false in a prefill, whose logits nobody reads.
    """

    cache: Cache
    token_ids: mx.array
    wants_logits: bool = True

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return self.token_ids.size


@dataclass(frozen=True, eq=False)
class Evaluate:
    """Arrays whose values are wanted now. Those of all sessions are evaluated at once: waiting for a device is slow."""

    arrays: Sequence[mx.array]


def forward(feeds: Sequence[Feed], *, owns_all_cores: bool = True) -> list[mx.array]:
    """Let each session's cache take in its tokens, lazily, and return the logits [n, vocabulary rows] after each.

    Layers that treat tokens one by one compute all of them at once, a row for each: nothing is padded, and sessions may
    bring different numbers of tokens. Attention is computed session by session, on the caches of mlx-lm: a session
    comes, goes and rewinds without the others.
    `owns_all_cores` says that nobody else needs the cores of a CPU meanwhile.
    """
    with using_cores(owns_all=owns_all_cores):
        return _forward(feeds)


def _forward(feeds: Sequence[Feed]) -> list[mx.array]:
    mx.async_eval([feed.token_ids for feed in feeds])  # the device chooses tokens while Python builds the next pass
    if len(feeds) == 1 or not feeds[0].cache.batches:
        return _forward_one_by_one(feeds)
    network = feeds[0].cache.network  # the one that all have
    sizes = [feed.num_tokens for feed in feeds]
    spans = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
    offset = mx.array([feed.cache.layers.num_fed + i for feed in feeds for i in range(feed.num_tokens)])
    layers = [
        _BatchLayer(of_sessions, spans, offset)
        for of_sessions in zip(*(feed.cache.layers.caches for feed in feeds), strict=True)
    ]
    tokens = mx.concatenate([feed.token_ids for feed in feeds])
    rows: mx.array = network(tokens[:, None], cache=layers)
    for feed in feeds:
        feed.cache.layers.fed(feed.num_tokens)
    return [rows[span, 0] for span in spans]


def _forward_one_by_one(feeds: Sequence[Feed]) -> list[mx.array]:
    outputs = []
    for feed in feeds:
        outputs.append(feed.cache.network(feed.token_ids[None], cache=feed.cache.layers.caches).squeeze(0))
        feed.cache.layers.fed(feed.num_tokens)
    return outputs


def enable_batches(network: Module, expected: mx.array | None = None) -> bool:
    """Let the attention of a model, in whichever modules of mlx-lm it is, take the keys of several sessions.

    Returns whether the model can compute several sessions in one pass: two short sessions must get the logits that they
    get alone. That need not try any length: each session's attention gets the mask of its own cache, and raises an
    error if the model keeps it back. `expected` are the logits alone, if they are known.
    """
    replace_function(network, "scaled_dot_product_attention", _batched, mark="takes_batches")
    try:
        alone = expected if expected is not None else trial_logits(network, batches=False)
        return agree(trial_logits(network, batches=True), alone)
    except Exception:  # of any kind: the offset, the masks and the caches are not those that models expect
        return False


def trial_logits(network: Module, *, batches: bool) -> mx.array:
    """Return the logits [4, rows] that two sessions with five tokens and one get for three tokens and one more."""
    caches = [BareCache(network, SessionLayers(network), batches) for _ in range(2)]
    for tokens in ([[1, 2, 3, 4, 5], [6]], [[7, 8, 9], [10]]):
        outputs = forward([Feed(cache, mx.array(ids)) for cache, ids in zip(caches, tokens, strict=True)])
    logits = mx.concatenate(outputs)
    mx.eval(logits)
    return logits


def agree(logits: mx.array, expected: mx.array) -> bool:
    """Return whether two ways to compute the same logits differ by rounding only.

    In float32, rounding makes 1e-6 of the largest logit in small models and 1e-4 where a model has another formula for
    one token than for several (multi-head latent attention). A wrong mask or position changes logits by a tenth and
    more. In 16 bits it is eight roundings of the largest logit, 0.06 in bfloat16.
    """
    tolerance = max(1e-3, 8 * mx.finfo(logits.dtype).eps)
    # Not `>`: what is NaN does not agree.
    return bool(mx.max(mx.abs(logits - expected)) <= tolerance * mx.max(mx.abs(expected)))


class _BatchLayer:
    """A layer's caches of the sessions of a batch, in the place of one cache of mlx-lm.

    The model sees every token as a row of its own, [tokens, heads, 1, size], at its own position.
    """

    def __init__(self, caches: Sequence[Any], spans: Sequence[slice], offset: mx.array) -> None:
        self.caches = caches
        self.spans = spans
        self.offset = offset
        self._begins = [span.start for span in spans[1:]]

    def __getitem__(self, part: int) -> _BatchLayer:
        """Return one of the caches that a layer has several of."""
        return _BatchLayer([cache[part] for cache in self.caches], self.spans, self.offset)

    def make_mask(self, _: int, **options: Any) -> _Masks:
        """Return the mask of each session, as its own cache makes it; `options` are the model's, such as a window."""
        pairs = zip(self.caches, self.spans, strict=True)
        return _Masks([cache.make_mask(span.stop - span.start, **options) for cache, span in pairs])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[_Sessions, _Sessions]:
        """Append to each session's cache, and return what each has."""
        pairs = [
            cache.update_and_fetch(k, v)
            for cache, k, v in zip(self.caches, self.by_session(keys), self.by_session(values), strict=True)
        ]
        return _Sessions([k for k, _ in pairs]), _Sessions([v for _, v in pairs])

    def by_session(self, rows: mx.array) -> list[mx.array]:
        """Part rows [tokens, heads, 1, size] into the sessions' sequences [1, heads, n, size]."""
        sequences: list[mx.array] = mx.split(rows.swapaxes(0, 2), self._begins, axis=2)  # type: ignore[assignment]
        return sequences


@dataclass(frozen=True, eq=False)
class _Sessions:
    """The keys, or the values, of the sessions of a batch: arrays [1, heads, length, size]."""

    arrays: list[mx.array]


@dataclass(frozen=True, eq=False)
class _Masks:
    """The masks of the sessions of a batch, as mlx-lm's attention takes them: an array, "causal", or None."""

    of_sessions: list[mx.array | str | None]


def _batched(single: Any) -> Any:
    """Return an attention that takes what sessions have as well, in the place of one that takes arrays."""

    @wraps(single)
    def scaled_dot_product_attention(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, **options: Any
    ) -> mx.array:
        if not isinstance(keys, _Sessions):
            result: mx.array = single(queries, keys, values, cache=cache, scale=scale, mask=mask, **options)
            return result
        if not isinstance(mask, _Masks):
            raise TypeError(f"attention over several sessions got {type(mask).__name__} in place of their masks")

        own_queries = cache.by_session(queries)

        def attend(some: slice) -> list[mx.array]:
            outputs = []
            sessions = zip(own_queries, keys.arrays, values.arrays, mask.of_sessions, strict=True)
            for q, k, v, own_mask in [*sessions][some]:
                outputs.append(single(q, k, v, cache=None, scale=scale, mask=own_mask, **options))
            return outputs

        num_rows, heads = queries.shape[:2]
        num_weights = [heads * q.shape[2] * k.shape[2] for q, k in zip(own_queries, keys.arrays, strict=True)]
        outputs = share_sessions(num_rows, num_weights, attend)
        return mx.concatenate(outputs, axis=2).swapaxes(0, 2)

    return scaled_dot_product_attention

"""One forward pass over tokens of several sessions, each with a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, make_prompt_cache

from specd.worker.blas import keeps_to_one_thread
from specd.worker.network import modules_of
from specd.worker.streams import can_share, even_parts, share_out

# From so many attention weights on, of all rows and heads, the sessions are shared out to the cores.
_WEIGHTS_FOR_ALL_STREAMS = 20_000


class Cache(Protocol):
    """A session's cache."""

    @property
    def network(self) -> Module:
        """The model that it is of."""

    @property
    def layers(self) -> list[KVCache]:
        """The cache of each of its layers."""

    @property
    def batches(self) -> bool:
        """Whether the model can compute several sessions in one pass."""


@dataclass(frozen=True, eq=False)
class BareCache:
    """A cache of no session, to try a model with."""

    network: Module
    layers: list[KVCache]
    batches: bool


@dataclass(frozen=True, eq=False)
class Feed:
    """Tokens [n] that a session's cache is to take in next.

    `wants_logits` says whether what comes after them matters, as it does not in a prefill. What `can_wait` is for later
    use, and not asked for yet.
    """

    cache: Cache
    token_ids: mx.array
    wants_logits: bool = True
    can_wait: bool = False

    @property
    def num_tokens(self) -> int:
        """How many tokens there are."""
        return self.token_ids.size


@dataclass(frozen=True, eq=False)
class Evaluate:
    """Arrays whose values are wanted now. Those of all sessions are evaluated at once: waiting for a device is slow."""

    arrays: Sequence[mx.array]


def forward(feeds: Sequence[Feed]) -> list[mx.array]:
    """Let each session's cache take in its tokens, lazily, and return the logits [n, vocabulary rows] after each.

    What does not depend on other tokens is computed for all of them at once, a row for each, whichever session they
    are of: nothing is padded, and sessions may bring different numbers of tokens. Attention, which does, is computed
    session by session, on caches that are those of mlx-lm: a session comes, goes and rewinds without the others.
    """
    mx.async_eval([feed.token_ids for feed in feeds])  # the device chooses tokens while Python builds the next pass
    if len(feeds) == 1 or not feeds[0].cache.batches:
        return _forward_one_by_one(feeds)
    network = feeds[0].cache.network  # the one that all have
    sizes = [feed.num_tokens for feed in feeds]
    spans = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
    offset = mx.array([feed.cache.layers[0].offset + i for feed in feeds for i in range(feed.num_tokens)])
    layers = [
        _BatchLayer(of_sessions, spans, offset)
        for of_sessions in zip(*(feed.cache.layers for feed in feeds), strict=True)
    ]
    tokens = mx.concatenate([feed.token_ids for feed in feeds])
    rows: mx.array = network(tokens[:, None], cache=layers)
    return [rows[span, 0] for span in spans]


def _forward_one_by_one(feeds: Sequence[Feed]) -> list[mx.array]:
    return [feed.cache.network(feed.token_ids[None], cache=feed.cache.layers).squeeze(0) for feed in feeds]


def enable_batches(network: Module) -> bool:
    """Let the attention of a model, in whichever modules of mlx-lm it is, take the keys of several sessions.

    Returns whether that works: tries it, because a model can do with its cache's offset what it likes.
    """
    for module in modules_of(network):
        single = getattr(module, "scaled_dot_product_attention", None)
        if single is not None and not hasattr(single, "takes_batches"):
            module.scaled_dot_product_attention = _batched(single)  # type: ignore[attr-defined]
    try:
        together, alone = (mx.concatenate(_try(network, batches)) for batches in (True, False))
        # Where a token gets another's place or keys, the difference is as large as the logits.
        return bool(mx.max(mx.abs(together - alone)) < 0.1 * mx.max(mx.abs(alone)))
    except Exception:  # whatever a model can raise on an offset or a cache that is not what it expects
        return False


def _try(network: Module, batches: bool) -> list[mx.array]:
    """Feed three tokens to one session and one to another, which hold five and one."""
    caches = [BareCache(network, make_prompt_cache(network), batches) for _ in range(2)]
    for tokens in ([[1, 2, 3, 4, 5], [6]], [[7, 8, 9], [10]]):
        outputs = forward([Feed(cache, mx.array(ids)) for cache, ids in zip(caches, tokens, strict=True)])
    return outputs


class _BatchLayer:
    """A layer's caches of the sessions of a batch, in the place of one cache of mlx-lm.

    The model sees every token as a row of its own, [tokens, heads, 1, size], at its own position.
    """

    def __init__(self, caches: Sequence[KVCache], spans: Sequence[slice], offset: mx.array) -> None:
        self.caches = caches
        self.spans = spans
        self.offset = offset
        self._begins = [span.start for span in spans[1:]]

    def make_mask(self, *_: Any, **__: Any) -> None:
        """Return no mask: attention gets its own, session by session."""

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


def _batched(single: Any) -> Any:
    def scaled_dot_product_attention(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, **options: Any
    ) -> mx.array:
        if not isinstance(keys, _Sessions):
            result: mx.array = single(queries, keys, values, cache=cache, scale=scale, mask=mask, **options)
            return result

        own_queries = cache.by_session(queries)

        def attend(some: slice) -> list[mx.array]:
            outputs = []
            for q, k, v in zip(own_queries[some], keys.arrays[some], values.arrays[some], strict=True):
                own_mask = "causal" if q.shape[2] > 1 else None
                outputs.append(single(q, k, v, cache=None, scale=scale, mask=own_mask, **options))
            return outputs

        parts = _parts(queries, keys.arrays, cache.spans)
        outputs = chain.from_iterable(share_out([partial(attend, part) for part in parts]))
        return mx.concatenate([*outputs], axis=2).swapaxes(0, 2)

    scaled_dot_product_attention.takes_batches = True  # type: ignore[attr-defined]
    return scaled_dot_product_attention


def _parts(queries: mx.array, keys: Sequence[mx.array], spans: Sequence[slice]) -> list[slice]:
    """Return which sessions attend together: all, or as many on each stream as have about the same to weigh."""
    num_rows, heads = queries.shape[:2]
    if can_share(num_rows) and keeps_to_one_thread():
        num_weights = [heads * (span.stop - span.start) * k.shape[2] for span, k in zip(spans, keys, strict=True)]
        if sum(num_weights) >= _WEIGHTS_FOR_ALL_STREAMS:
            return even_parts(num_weights)
    return [slice(0, len(spans))]

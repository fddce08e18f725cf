"""The caches of several sessions behind the interface of one cache, and attention over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import mlx.core as mx

from specd.worker.cpu.streams import share_sessions


class BatchLayer:
    """A layer's caches for the sessions of a batch, behind the interface of one cache of mlx-lm.

    The model sees every token as a row of its own, [tokens, heads, 1, size], at its own position.
    """

    def __init__(self, caches: Sequence[Any], spans: Sequence[slice], offset: mx.array) -> None:
        self.caches = caches
        self.spans = spans
        self.offset = offset
        self._begins = [span.start for span in spans[1:]]

    def __getitem__(self, part: int) -> BatchLayer:
        """Return one of the several caches of a layer."""
        return BatchLayer([cache[part] for cache in self.caches], self.spans, self.offset)

    def make_mask(self, _: int, **options: Any) -> Masks:
        """Return the mask of each session, as its own cache makes it; `options` are the model's, such as a window."""
        pairs = zip(self.caches, self.spans, strict=True)
        return Masks([cache.make_mask(span.stop - span.start, **options) for cache, span in pairs])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[_Sessions, _Sessions]:
        """Append to each session's cache, and return its content."""
        return self._sessions(
            cache.update_and_fetch(k, v)
            for cache, k, v in zip(self.caches, self.by_session(keys), self.by_session(values), strict=True)
        )

    def keys_and_values(self) -> tuple[_Sessions, _Sessions]:
        """Return the content of each session's cache, for layers that do not add to it."""
        return self._sessions(cache.keys_and_values() for cache in self.caches)

    def _sessions(self, pairs: Iterable[tuple[Any, Any]]) -> tuple[_Sessions, _Sessions]:
        # This object must not refer to them: such a cycle would keep them until Python collects cycles.
        keys, values = zip(*pairs, strict=True)
        return _Sessions(keys, self), _Sessions(values, self)

    def by_session(self, rows: mx.array) -> list[mx.array]:
        """Part rows [tokens, heads, 1, size] into the sessions' sequences [1, heads, n, size]."""
        sequences: list[mx.array] = mx.split(rows.swapaxes(0, 2), self._begins, axis=2)  # type: ignore[assignment]
        return sequences


@dataclass(frozen=True, eq=False)
class _Sessions:
    """The keys, or the values, of the sessions of a batch: arrays [1, heads, length, size], or quantised ones."""

    of_sessions: Sequence[Any]
    batch: BatchLayer


@dataclass(frozen=True, eq=False)
class Masks:
    """The masks of the sessions of a batch, as mlx-lm's attention takes them: an array, "causal", or None."""

    of_sessions: list[mx.array | str | None]


def attention_for_batches(single: Any) -> Any:
    """Return an attention function that accepts the keys and values of several sessions, and arrays as before."""

    @wraps(single)
    def scaled_dot_product_attention(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, **options: Any
    ) -> mx.array:
        if not isinstance(keys, _Sessions):
            result: mx.array = single(queries, keys, values, cache=cache, scale=scale, mask=mask, **options)
            return result
        if not isinstance(mask, Masks):
            raise TypeError(f"attention over several sessions got {type(mask).__name__} instead of their masks")

        own_queries = keys.batch.by_session(queries)

        def attend(some: slice) -> list[mx.array]:
            outputs = []
            sessions = zip(
                own_queries, keys.of_sessions, values.of_sessions, keys.batch.caches, mask.of_sessions, strict=True
            )
            for q, k, v, own_cache, own_mask in [*sessions][some]:
                outputs.append(single(q, k, v, cache=own_cache, scale=scale, mask=own_mask, **options))
            return outputs

        num_rows, heads = queries.shape[:2]
        num_weights = [heads * q.shape[2] * _length(k) for q, k in zip(own_queries, keys.of_sessions, strict=True)]
        outputs = share_sessions(num_rows, num_weights, attend)
        return mx.concatenate(outputs, axis=2).swapaxes(0, 2)

    return scaled_dot_product_attention


def _length(keys: Any) -> int:
    array: mx.array = keys if isinstance(keys, mx.array) else keys[0]
    return array.shape[2]

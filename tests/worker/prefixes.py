"""Sessions of a tiny model, whose logits are checked, and what they leave in a prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from specd.worker.engine.jobs import Steps
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.session.prefix_cache import PrefixCache
from specd.worker.session.session_cache import SessionCache
from tests.worker.driving import Chunks, feed_now, finish
from tests.worker.models import tiny_model

MODEL = tiny_model()
# A limit of the fixture `small_sizes`.
BLOCK = 4  # tokens by which a buffer grows
MAX_LOST = 3  # tokens of an entry that is moved
BLOCK_BYTES = 1024  # of the tiny model: 2 layers of keys and values, 2 heads of 8 floats, 4 tokens
PLENTY = 2**30
CHUNK = Chunks(3)


def fresh_logits(token_ids: Sequence[int]) -> np.ndarray:
    return np.array(MODEL.network(mx.array([token_ids]))[0])


def request(cache: SessionCache, position: int, token_ids: Sequence[int], proposal: Sequence[int] = ()) -> None:
    """Verify a proposal, and check the logits against those without any cache."""
    session = [*cache.token_ids[:position], *token_ids]
    fed = [*finish(cache.prefill(position, token_ids, CHUNK)), *proposal]
    assert cache.token_ids == session[: len(session) + len(proposal) - len(fed)]
    logits = np.array(feed_now(cache, fed))
    cache.commit(fed)
    assert cache.token_ids == [*session, *proposal]
    np.testing.assert_allclose(logits, fresh_logits(cache.token_ids)[-len(fed) :], atol=0.02)  # of about 10


def request_stepwise(
    cache: SessionCache, position: int, token_ids: Sequence[int], drafted: Sequence[int]
) -> Steps[None]:
    """Propose, the tokens being given; a step for each."""
    latest = yield from cache.prefill(position, token_ids, CHUNK)
    pending = latest
    for token_id in drafted:
        mx.async_eval((yield from cache.feed(mx.array(latest))))
        latest = [token_id]
    if drafted:
        cache.commit([*pending, *drafted[:-1]])


def session(prefixes: PrefixCache | None, token_ids: Sequence[int]) -> SessionCache:
    """Begin a session."""
    cache = SessionCache(MODEL, prefixes)
    request(cache, 0, token_ids)
    return cache


def leave(prefixes: PrefixCache, token_ids: Sequence[int]) -> None:
    """Hold a whole session."""
    session(prefixes, token_ids).keep()


def stored(prefixes: PrefixCache) -> list[tuple[int, ...]]:
    return [cast("tuple[int, ...]", entry.key[1:]) for entry in prefixes._entries]


def contents(layers: SessionLayers) -> list[np.ndarray]:
    return [np.array(array) for array in layers.arrays]


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(x.shape == y.shape and (x == y).all() for x, y in zip(a, b, strict=True))


class Watch:
    """Looks after every change whether the prefix cache is as it says, and its entries as they came."""

    def __init__(self, prefixes: PrefixCache, budget_bytes: int) -> None:
        self._prefixes, self._budget_bytes = prefixes, budget_bytes
        self._seen: dict[Any, list[np.ndarray]] = {}

    def look(self) -> None:
        entries = self._prefixes._entries
        tokens = [entry.key for entry in entries]
        assert tokens == sorted(tokens)
        assert not any(a == b[: len(a)] for a in tokens for b in tokens if a is not b)
        held = sum(array.nbytes for entry in entries for array in entry.layers.arrays)
        assert held == self._prefixes.nbytes <= self._budget_bytes
        for entry in entries:
            assert {cache.offset for cache in entry.layers.caches} == {entry.num_tokens} == {entry.layers.num_fed}
            assert same(self._seen.setdefault(entry, contents(entry.layers)), contents(entry.layers))


def token_lists(min_size: int, max_size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 2), min_size=min_size, max_size=max_size)


def layers_of(token_ids: Sequence[int]) -> SessionLayers:
    """Make a layer whose keys are the tokens."""
    layers = SessionLayers(cast(Any, SimpleNamespace(layers=[None])))
    keys = mx.array(list(token_ids), mx.float32).reshape(1, 1, -1, 1)
    cast(Any, layers.caches[0]).update_and_fetch(keys, -keys)
    layers.fed(len(token_ids))
    return layers

"""Sessions of a tiny model, whose logits are checked, and what they leave in a prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import numpy as np

from specd.worker.cache.prefix_cache import PrefixCache
from specd.worker.cache.session_cache import SessionCache
from specd.worker.engine.engine import Steps
from tests.worker.driving import Chunks, feed_now, finish
from tests.worker.models import tiny_model

MODEL = tiny_model()
# Of the fixture `small_sizes`.
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

"""Proposing tokens with the draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from specd.worker.engine import Steps
from specd.worker.session_cache import SessionCache


@dataclass(frozen=True)
class Proposal:
    """What the draft proposes to come next, and how much its cache holds now."""

    token_ids: list[int]
    cached_len: int


def propose(
    cache: SessionCache, position: int, token_ids: Sequence[int], num_draft_tokens: int, *, prefill_chunk_tokens: int
) -> Steps[Proposal]:
    """Hold the first `position` tokens, append `token_ids`, and propose the `num_draft_tokens` after them, greedily.

    The last proposed token is not fed back, so the cache then holds position + len(token_ids) + num_draft_tokens - 1
    tokens. With no tokens to propose this is a prefill, which leaves the last few tokens to the next request.
    """
    pending = yield from cache.prefill(position, token_ids, prefill_chunk_tokens)

    latest = mx.array(pending)
    proposed: list[mx.array] = []
    for _ in range(num_draft_tokens):
        latest = mx.argmax(cache.feed(latest)[-1:], axis=-1)
        mx.async_eval(latest)  # the device works on this step while Python builds the next
        proposed.append(latest)
        yield
    if not proposed:
        return Proposal([], cache.cached_len)
    proposal: list[int] = mx.concatenate(proposed).tolist()  # type: ignore[assignment]
    cache.commit([*pending, *proposal[:-1]])
    return Proposal(proposal, cache.cached_len)

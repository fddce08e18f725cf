"""Verifying a proposal with the target model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from specd.worker.engine import Steps
from specd.worker.session_cache import SessionCache


@dataclass(frozen=True)
class Verdict:
    """How much of a proposal the target accepts, its own next token, and how much its cache holds now."""

    num_accepted: int
    next_token_id: int
    cached_len: int


def verify(
    cache: SessionCache, position: int, token_ids: Sequence[int], proposal: Sequence[int], *, prefill_chunk_tokens: int
) -> Steps[Verdict]:
    """Hold the first `position` tokens, append `token_ids` and the proposal, and say how much of it the target accepts.

    One forward pass over the last of `token_ids` and the proposal gives the target's own choice at each of these
    len(proposal) + 1 places (Leviathan et al., arXiv 2211.17192, algorithm 1, in the greedy case).
    """
    pending = yield from cache.prefill(position, token_ids, prefill_chunk_tokens)

    fed = [*pending, *proposal]
    logits = cache.feed(mx.array(fed))[len(pending) - 1 :]
    chosen: list[int] = mx.argmax(logits, axis=-1).tolist()  # type: ignore[assignment]
    cache.commit(fed)
    num_accepted = count_accepted(proposal, chosen)
    return Verdict(num_accepted, chosen[num_accepted], cache.cached_len)


def count_accepted(proposal: Sequence[int], chosen: Sequence[int]) -> int:
    """Count the proposed tokens before the first that is not the target's own choice at its place."""
    pairs = zip(proposal, chosen, strict=False)
    return next((i for i, (proposed, own) in enumerate(pairs) if proposed != own), len(proposal))

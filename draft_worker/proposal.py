"""Proposing tokens with the draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from specd.sampling import TokenDistribution
from specd.worker.batch import Evaluate
from specd.worker.chunk_size import ChunkSize
from specd.worker.distribution import encode_distributions
from specd.worker.engine import Steps
from specd.worker.sampler import NonFiniteLogitsError, Sampler, are_finite
from specd.worker.session_cache import SessionCache


@dataclass(frozen=True)
class Proposal:
    """What the draft proposes to come next, and how much its cache holds now.

    With acceptance by REJECTION, `distributions` are those that the tokens were sampled from.
    """

    token_ids: list[int]
    cached_len: int
    distributions: list[TokenDistribution] = field(default_factory=list)


def propose(
    cache: SessionCache,
    sampler: Sampler,
    position: int,
    token_ids: Sequence[int],
    num_draft_tokens: int,
    *,
    chunk: ChunkSize,
) -> Steps[Proposal]:
    """Hold the first `position` tokens, append `token_ids`, and propose the `num_draft_tokens` after them.

    The last proposed token is not fed back, so the cache then holds position + len(token_ids) + num_draft_tokens - 1
    tokens. With no tokens to propose this is a prefill, which leaves the last few tokens to the next request.

    Raises NonFiniteLogitsError when the model's logits are not finite.
    """
    pending = yield from cache.prefill(position, token_ids, chunk)
    if num_draft_tokens == 0:
        return Proposal([], cache.cached_len)

    next_position = position + len(token_ids)
    noise = sampler.draft_noise(next_position, num_draft_tokens)
    history = sampler.history(cache.token_ids, pending)
    latest = mx.array(pending)
    proposed: list[mx.array] = []
    finite: list[mx.array] = []
    probabilities: list[mx.array] = []
    for i in range(num_draft_tokens):
        logits = (yield from cache.feed(latest))[-1:]
        scores = sampler.scores(logits, next_position + i, history)
        latest = sampler.choose(scores, noise[i : i + 1] if noise is not None else None)
        proposed.append(latest)
        finite.append(are_finite(logits))
        if sampler.rejects:
            probabilities.append(sampler.probabilities(scores))
        if history is not None:
            history = mx.concatenate([history, latest])
    token_ids_proposed, all_finite = mx.concatenate(proposed), mx.all(mx.stack(finite))
    yield Evaluate([token_ids_proposed, all_finite, *probabilities])
    if not all_finite:
        raise NonFiniteLogitsError
    proposal: list[int] = token_ids_proposed.tolist()  # type: ignore[assignment]
    cache.commit([*pending, *proposal[:-1]])
    # However many of them are accepted.
    sampler.prepare_draft_noise(next_position + 1, 2 * num_draft_tokens)
    distributions = encode_distributions(np.array(mx.concatenate(probabilities))) if probabilities else []
    return Proposal(proposal, cache.cached_len, distributions)

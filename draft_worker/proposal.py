"""Proposing tokens with the draft model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from draft_worker.path import Path
from draft_worker.session import DraftSession
from specd.sampling import TokenDistribution
from specd.worker.batch import Evaluate
from specd.worker.chunk_size import ChunkSize
from specd.worker.distribution import encode_distributions
from specd.worker.engine import Steps
from specd.worker.sampler import NonFiniteLogitsError, checksum, confidence_of, is_finite


@dataclass(frozen=True)
class Proposal:
    """What the draft proposes to come next, and how much its cache holds now.

    `confidences` say how clear the choice of each token was, if they were asked for. With acceptance by REJECTION,
    `distributions` are those that the tokens were sampled from. `is_ahead` says that this comes after a proposal that
    the target has not verified yet, the guess of the target's own token first.
    """

    token_ids: list[int]
    cached_len: int
    distributions: list[TokenDistribution] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    is_ahead: bool = False


def propose(
    session: DraftSession,
    position: int,
    token_ids: Sequence[int],
    num_draft_tokens: int,
    *,
    chunk: ChunkSize,
    min_confidences: Sequence[float] = (),
) -> Steps[Proposal]:
    """Hold the first `position` tokens, append `token_ids`, and propose up to `num_draft_tokens` after them.

    There are only i, or one more, if the product of the first i confidences is less than the i-th of
    `min_confidences`. Tokens that the draft has chosen already for exactly these tokens are not computed again. The
    last proposed token is not fed back, so the cache holds all before it. With no tokens to propose this is a prefill,
    which leaves the last few tokens to the next request.

    Raises NonFiniteLogitsError when the model's logits are not finite.
    """
    first = session.path.num_given(session.cache, position, token_ids)
    knows_confidences = len(session.path.confidences) == len(session.path.token_ids)
    if first is not None and num_draft_tokens > 0 and (knows_confidences or not min_confidences):
        pending = session.path.token_ids[-1:]
    else:
        first = 0
        session.path = Path(position + len(token_ids))  # at once: a prefill can be dropped half-way
        pending = yield from session.cache.prefill(position, token_ids, chunk)
        if num_draft_tokens == 0:
            return Proposal([], session.cache.cached_len)
    end = yield from _extend(session, pending, first, num_draft_tokens, min_confidences)
    return _proposal(session, slice(first, end))


def go_ahead(
    session: DraftSession,
    proposal: Sequence[int],
    position: int,
    num_draft_tokens: int,
    *,
    min_confidences: Sequence[float],
    min_ahead_confidence: float,
) -> Steps[Proposal]:
    """Guess the token that the target will add to a proposal, from `position` on, and propose up to so many more.

    Goes no further than the guess if the product of its confidence and the proposal's is less than
    `min_ahead_confidence`. What comes after the guess ends as a proposal does.
    """
    path = session.path
    begin = position - path.start
    end = begin + len(proposal)
    guessed = yield from _extend(session, path.token_ids[-1:], end, 1, (), can_wait=True)
    if math.prod(path.confidences[begin:guessed]) >= min_ahead_confidence:
        guessed = yield from _extend(
            session, path.token_ids[-1:], guessed, num_draft_tokens, min_confidences, can_wait=True
        )
    return _proposal(session, slice(end, guessed), is_ahead=True)


def _proposal(session: DraftSession, span: slice, *, is_ahead: bool = False) -> Proposal:
    path = session.path
    return Proposal(
        path.token_ids[span], session.cache.cached_len, path.distributions[span], path.confidences[span], is_ahead
    )


def _extend(
    session: DraftSession,
    pending: list[int],
    first: int,
    num_draft_tokens: int,
    min_confidences: Sequence[float],
    *,
    can_wait: bool = False,
) -> Steps[int]:
    """Go on along the path from `pending`, which it ends with, until a proposal from its `first` token on is complete.

    Returns where in the path the proposal ends. What can wait is kept token by token, because it can be dropped.
    """
    path = session.path
    while len(path.token_ids) < (end := _end(path.confidences, first, num_draft_tokens, min_confidences)):
        missing = end - len(path.token_ids)
        yield from _choose(session, pending, 1 if can_wait else missing, first, min_confidences, can_wait=can_wait)
        pending = path.token_ids[-1:]
    return end


def _end(confidences: Sequence[float], first: int, most: int, min_confidences: Sequence[float]) -> int:
    """Return where a proposal from `first` on ends, by the confidences that are known.

    It has the token after the one that ends it, which costs hardly anything by then.
    """
    product = 1.0
    for i, (confidence, least) in enumerate(zip(confidences[first : first + most], min_confidences, strict=False)):
        product *= confidence
        if product < least:
            return min(first + i + 2, first + most)
    return first + most


def _choose(
    session: DraftSession,
    pending: list[int],
    count: int,
    first: int,
    min_confidences: Sequence[float],
    *,
    can_wait: bool,
) -> Steps[None]:
    """Feed `pending`, and let the draft choose up to so many tokens after it, for a proposal from `first` on.

    The device need not wait for Python in between: while it chooses one token, the next step is built, and what the
    proposal is worth is looked at a token late.
    """
    cache, sampler, path = session.cache, session.sampler, session.path
    noise = sampler.draft_noise(path.end, count)
    history = sampler.history(cache.token_ids, pending)
    latest = mx.array(pending)
    chosen: list[mx.array] = []
    checksums: list[mx.array] = []
    best_two: list[mx.array] = []
    probabilities: list[mx.array] = []
    product = math.prod(path.confidences[first:])
    for i in range(count):
        logits = (yield from cache.feed(latest, can_wait=can_wait))[-1:]
        scores = sampler.scores(logits, path.end + i, history)
        own_noise = noise[i : i + 1] if noise is not None else None
        latest = sampler.choose(scores, own_noise)
        chosen.append(latest)
        checksums.append(checksum(logits))
        if sampler.rejects:
            probabilities.append(sampler.probabilities(scores))
        if history is not None:
            history = mx.concatenate([history, latest])
        if min_confidences or can_wait:
            best_two.append(sampler.best_two(scores, own_noise))
            mx.async_eval(latest, best_two[-1])
            if i > 0:
                product *= confidence_of(best_two[i - 1])
                place = len(path.token_ids) + i - 1 - first
                if place < len(min_confidences) and product < min_confidences[place]:
                    break
    all_chosen = mx.concatenate(chosen)
    yield Evaluate([all_chosen, *checksums, *best_two, *probabilities])
    if not all(map(is_finite, checksums)):
        raise NonFiniteLogitsError
    token_ids: list[int] = all_chosen.tolist()  # type: ignore[assignment]
    cache.commit([*pending, *token_ids[:-1]])
    path.token_ids += token_ids
    path.confidences += map(confidence_of, best_two)
    path.distributions += encode_distributions(np.array(mx.concatenate(probabilities))) if probabilities else []
    # However many of them are accepted.
    sampler.prepare_draft_noise(path.end + 1 - len(token_ids), 2 * len(token_ids))

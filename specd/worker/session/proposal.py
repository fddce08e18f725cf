"""Proposing tokens with the draft model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np

from specd.sampling import Sampling, TokenDistribution
from specd.worker.engine.jobs import Evaluate, Steps
from specd.worker.engine.prefill_chunk import PrefillChunk
from specd.worker.model.loader import LoadedModel
from specd.worker.sampling.distribution import encode_distributions
from specd.worker.sampling.margin import best_two, confidence_of
from specd.worker.sampling.sampler import NonFiniteLogitsError, Sampler, checksum, is_finite
from specd.worker.session.session_cache import SessionCache


@dataclass(frozen=True)
class DraftedTokens:
    """The tokens that the draft proposes, and how many tokens its cache holds now.

    `confidences` has the confidence of each token, if the request asked for it. With acceptance by REJECTION,
    `distributions` has the distribution that each token was sampled from.
    """

    token_ids: list[int]
    cached_len: int
    distributions: list[TokenDistribution] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)


def propose(
    cache: SessionCache,
    sampler: Sampler,
    position: int,
    token_ids: Sequence[int],
    num_draft_tokens: int,
    *,
    chunk: PrefillChunk,
    min_confidences: Sequence[float] = (),
) -> Steps[DraftedTokens]:
    """Hold the first `position` tokens, append `token_ids`, and propose up to `num_draft_tokens` after them.

    The proposal ends early, with token i or the one after it, if the product of the first i confidences is less than
    the i-th of `min_confidences`. The last proposed token is not fed back, so the cache holds all before it. With
    `num_draft_tokens` 0 this is a prefill, which leaves the last few tokens to the next request.

    Raises NonFiniteLogitsError when the model's logits are not finite.
    """
    pending = yield from cache.prefill(position, token_ids, chunk)
    if num_draft_tokens == 0:
        return DraftedTokens([], cache.cached_len)

    def feed(latest: mx.array | None) -> Steps[mx.array]:
        logits = yield from cache.feed(latest if latest is not None else mx.array(pending))
        return logits[-1:]

    start = position + len(token_ids)
    history = sampler.history(cache.token_ids, pending)
    drafted = yield from draft_tokens(feed, sampler, start, history, num_draft_tokens, min_confidences)
    cache.commit([*pending, *drafted.token_ids[:-1]])
    return replace(drafted, cached_len=cache.cached_len)


def draft_tokens(
    feed: Callable[[mx.array | None], Steps[mx.array]],
    sampler: Sampler,
    start: int,
    history: mx.array | None,
    num_draft_tokens: int,
    min_confidences: Sequence[float],
) -> Steps[DraftedTokens]:
    """Draft tokens from position `start` on, one after the other.

    `feed` gives the logits [1, vocabulary_size] after the session's tokens, and then those after each drafted one [1].
    Raises NonFiniteLogitsError.
    """
    noise = sampler.draft_noise(start, num_draft_tokens)
    latest: mx.array | None = None
    chosen: list[mx.array] = []
    checksums: list[mx.array] = []
    bests: list[mx.array] = []
    probabilities: list[mx.array] = []
    product = 1.0
    for i in range(num_draft_tokens):
        logits = yield from feed(latest)
        scores = sampler.scores(logits, start + i, history)
        own_noise = noise[i : i + 1] if noise is not None else None
        latest = sampler.choose(scores, own_noise)
        chosen.append(latest)
        checksums.append(checksum(logits))
        if sampler.rejects:
            probabilities.append(sampler.probabilities(scores))
        if history is not None:
            history = mx.concatenate([history, latest])
        if min_confidences:
            bests.append(best_two(scores if own_noise is None else scores + own_noise, latest))
            # The device chooses this token while Python checks the confidence of the last one, so it never waits.
            mx.async_eval(latest, bests[-1])
            if 0 < i <= len(min_confidences):
                product *= confidence_of(bests[i - 1])
                if product < min_confidences[i - 1]:
                    break
    all_chosen = mx.concatenate(chosen)
    yield Evaluate([all_chosen, *checksums, *bests, *probabilities])
    if not all(map(is_finite, checksums)):
        raise NonFiniteLogitsError
    proposal: list[int] = all_chosen.tolist()  # type: ignore[assignment]
    # Noise for the next proposal, which begins behind any number of accepted tokens.
    sampler.prepare_draft_noise(start + 1, 2 * len(proposal))
    distributions = encode_distributions(np.array(mx.concatenate(probabilities))) if probabilities else []
    return DraftedTokens(proposal, 0, distributions, [*map(confidence_of, bests)])


def rehearse(model: LoadedModel) -> Steps[None]:
    """Propose some tokens, greedily and with a temperature."""
    num_draft_tokens = min(4, model.info.context_length - 1)
    prompt = [0] * min(64, model.info.context_length - num_draft_tokens)
    for temperature in (0.0, 1.0):
        cache = SessionCache(model)
        cache.source = (0,) * 64 if model.info.has_encoder else ()
        sampler = Sampler(Sampling(temperature=temperature), model.info.vocabulary_size)
        least = [0.0] * num_draft_tokens
        yield from propose(cache, sampler, 0, prompt, num_draft_tokens, chunk=PrefillChunk(1.0), min_confidences=least)
        cache.free()

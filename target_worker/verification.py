"""Verifying a proposal with the target model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from specd.sampling import Sampling, TokenLogProbabilities
from specd.worker.engine.jobs import Evaluate, Steps
from specd.worker.engine.prefill_chunk import PrefillChunk
from specd.worker.model.loader import LoadedModel
from specd.worker.sampling.distribution import Rows
from specd.worker.sampling.sampler import NonFiniteLogitsError, Sampler, checksum, is_finite
from specd.worker.session.session_cache import SessionCache
from target_worker.acceptance import accept_by_rejection, accept_coupled
from target_worker.log_probabilities import PromptLogProbabilities, log_probabilities


@dataclass(frozen=True)
class Verification:
    """The number of accepted tokens of a proposal, the target's own next token, and the length of its cache.

    `log_probabilities`, if the request asked for them, are for the accepted tokens and the next one. In a session's
    first request, `prompt_log_probabilities` are for the tokens before the proposal, without the first.
    """

    num_accepted: int
    next_token_id: int
    cached_len: int
    log_probabilities: list[TokenLogProbabilities] = field(default_factory=list)
    prompt_log_probabilities: list[TokenLogProbabilities] = field(default_factory=list)


def verify(
    cache: SessionCache,
    sampler: Sampler,
    position: int,
    token_ids: Sequence[int],
    proposal: Sequence[int],
    draft_probabilities: Rows | None = None,
    *,
    chunk: PrefillChunk,
    pad: Callable[[int], int] = int,
) -> Steps[Verification]:
    """Hold the first `position` tokens, append `token_ids` and the proposal, and return the verdict on the proposal.

    One forward pass over the last of `token_ids` and the proposal gives the target's distribution at each of these
    len(proposal) + 1 places (Leviathan et al., arXiv 2211.17192, algorithm 1). Acceptance by REJECTION needs
    `draft_probabilities` [len(proposal), vocabulary_size], which the proposal was sampled from. `pad` maps a
    number of tokens to the number to feed, because a wider step can be cheaper. The padding is no part of the session,
    and the next request rewinds it.

    Raises NonFiniteLogitsError when the model's logits are not finite.
    """
    top = sampler.sampling.top_log_probabilities
    prompt = None
    if sampler.sampling.prompt_log_probabilities and position == 0:
        prompt = PromptLogProbabilities(top or 0)
    pending = yield from cache.prefill(position, token_ids, chunk, prompt.add if prompt is not None else None)

    fed = [*pending, *proposal]
    padding = fed[-1:] * (pad(len(fed)) - len(fed))
    history = sampler.history(cache.token_ids, pending, proposal)
    rows = yield from cache.feed(mx.array(fed + padding))
    if prompt is not None:
        yield from prompt.add(rows[: len(pending) - 1], pending[1:])
    logits = rows[len(pending) - 1 : len(fed)]
    next_position = position + len(token_ids)
    scores = sampler.scores(logits, next_position, history)
    proposed = mx.array(list(proposal), mx.uint32)
    if sampler.rejects and proposal:
        assert draft_probabilities is not None
        accepted, own = accept_by_rejection(sampler, scores, next_position, proposed, mx.array(draft_probabilities))
    else:
        accepted, own = accept_coupled(sampler, scores, next_position, proposed)
    logits_checksum = checksum(logits)
    yield Evaluate([accepted, own, logits_checksum])
    if not is_finite(logits_checksum):
        raise NonFiniteLogitsError
    cache.commit(fed)

    num_accepted = count_accepted(accepted.tolist())  # type: ignore[arg-type]
    cache.known_len += num_accepted
    own_ids: list[int] = own.tolist()  # type: ignore[assignment]
    next_token_id = own_ids[num_accepted]
    sampler.prepare_own_noise(next_position + num_accepted + 1, len(proposal) + 1)
    emitted = [*proposal[:num_accepted], next_token_id]
    return Verification(
        num_accepted,
        next_token_id,
        cache.cached_len,
        log_probabilities(sampler, logits[: len(emitted)], scores[: len(emitted)], emitted, top)
        if top is not None
        else [],
        prompt.values if prompt is not None else [],
    )


def count_accepted(accepted: Sequence[bool]) -> int:
    """Count the tokens before the first that is not accepted."""
    return next((i for i, is_accepted in enumerate(accepted) if not is_accepted), len(accepted))


def rehearse(model: LoadedModel) -> Steps[None]:
    """Verify a proposal, greedily and with a temperature."""
    proposal = [0] * min(7, model.info.context_length - 1)
    prompt = [0] * min(64, model.info.context_length - len(proposal))
    for temperature in (0.0, 1.0):
        cache = SessionCache(model)
        cache.source = (0,) * 64 if model.info.has_encoder else ()
        sampler = Sampler(Sampling(temperature=temperature), model.info.vocabulary_size)
        yield from verify(cache, sampler, 0, prompt, proposal, chunk=PrefillChunk(1.0))
        cache.free()

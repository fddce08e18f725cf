"""Verifying a proposal with the target model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from specd.sampling import Margin, Sampling, TokenLogProbabilities
from specd.worker.engine.jobs import EarlyResult, Evaluate, Steps
from specd.worker.engine.prefill_chunk import PrefillChunk
from specd.worker.model.loader import LoadedModel
from specd.worker.sampling.distribution import Rows
from specd.worker.sampling.margin import COARSE_ROUNDING, choice_margins, near_tie_bounds
from specd.worker.sampling.sampler import NonFiniteLogitsError, Sampler
from specd.worker.session.grammar_masks import Allowed
from specd.worker.session.session_cache import SessionCache
from target_worker.acceptance import accept_by_rejection, accept_coupled
from target_worker.log_probabilities import PromptLogProbabilities, log_probabilities

# Passes that are under way while an answer travels: one that the device computes, and one that waits for it.
_STEPS_AHEAD = 2


@dataclass(frozen=True)
class Verification:
    """The number of accepted tokens of a proposal, the target's own next token, and the length of its cache.

    `log_probabilities`, if the request asked for them, are for the accepted tokens and the next one. In a session's
    first request, `prompt_log_probabilities` are for the tokens before the proposal, without the first. `margins` are
    for the accepted tokens and the next one, with acceptance by COUPLED.
    """

    num_accepted: int
    next_token_id: int
    cached_len: int
    log_probabilities: list[TokenLogProbabilities] = field(default_factory=list)
    prompt_log_probabilities: list[TokenLogProbabilities] = field(default_factory=list)
    margins: list[Margin] = field(default_factory=list)


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
    runs_ahead: bool = False,
    logit_rounding: float = 0.0,
    allowed: Allowed | None = None,
) -> Steps[Verification]:
    """Hold the first `position` tokens, append `token_ids` and the proposal, and return the verdict on the proposal.

    One forward pass over the last of `token_ids` and the proposal gives the target's distribution at each of these
    len(proposal) + 1 places (Leviathan et al., arXiv 2211.17192, algorithm 1). Acceptance by REJECTION needs
    `draft_probabilities` [len(proposal), vocabulary_size], which the proposal was sampled from. `pad` maps a
    number of tokens to the number to feed, because a wider step can be cheaper. The padding is no part of the session,
    and the next request rewinds it. With `runs_ahead`, a request without a proposal also starts the passes for the
    tokens after it; if the next request is something else, they are rewound. `logit_rounding` is the model's, for near
    ties. `allowed` gives the masks of the places, for a session with a grammar.

    Raises NonFiniteLogitsError when the model's logits are not finite.
    """
    top = sampler.sampling.top_log_probabilities
    prompt = None
    if sampler.sampling.prompt_log_probabilities and position == 0:
        prompt = PromptLogProbabilities(top or 0)
    next_position = position + len(token_ids)
    fed = [*token_ids, *proposal]
    choice = cache.fed_ahead(position, fed)
    if choice is None:
        pending = yield from cache.prefill(position, token_ids, chunk, prompt.add if prompt is not None else None)
        fed = [*pending, *proposal]
        padding = [] if runs_ahead and not proposal else fed[-1:] * (pad(len(fed)) - len(fed))
        history = sampler.history(cache.token_ids, pending, proposal)
        rows = yield from cache.feed(mx.array(fed + padding))
        if prompt is not None:
            yield from prompt.add(rows[: len(pending) - 1], pending[1:])
        logits = rows[len(pending) - 1 : len(fed)]
        mask = None
        if allowed is not None:
            mx.async_eval(logits)  # the pass, beside which the masks are made
            mask = allowed()
        choice = _choose(
            sampler, logits, next_position, history, logit_rounding, proposal, draft_probabilities, allowed=mask
        )
    yield Evaluate([*choice.arrays, *(cache.head_cache.arrays if cache.head_cache is not None else [])])
    if not all(map(math.isfinite, choice.largest.tolist())):
        raise NonFiniteLogitsError
    cache.commit(fed)

    num_accepted = count_accepted(choice.accepted.tolist())
    cache.known_len += num_accepted
    own_ids: list[int] = choice.own.tolist()
    next_token_id = own_ids[num_accepted]
    cache.expect(next_token_id)
    sampler.prepare_own_noise(next_position + num_accepted + 1, len(proposal) + 1)
    emitted = [*proposal[:num_accepted], next_token_id]
    verification = Verification(
        num_accepted,
        next_token_id,
        cache.cached_len,
        log_probabilities(sampler, choice.logits[: len(emitted)], choice.scores[: len(emitted)], emitted, top)
        if top is not None
        else [],
        prompt.values if prompt is not None else [],
        _near_ties(choice.margins, len(emitted)),
    )
    if runs_ahead and not proposal:
        yield EarlyResult(verification)
        yield from _run_ahead(cache, sampler, next_token_id, logit_rounding)
    return verification


def _run_ahead(cache: SessionCache, sampler: Sampler, next_token_id: int, logit_rounding: float) -> Steps[None]:
    """Start the passes for the next token, and for the one that it will choose, while the answer travels.

    The device then has work while Python describes and while messages travel, as in mlx-lm's own loop.
    """
    last: _Choice | None = cache.last_ahead
    while cache.num_ahead < _STEPS_AHEAD:
        position = cache.cached_len + 1 + cache.num_ahead
        if last is None:
            token, history = mx.array([next_token_id], mx.uint32), sampler.history(cache.token_ids, [next_token_id])
        else:
            token = last.own
            history = mx.concatenate([last.history, token]) if last.history is not None else None
        last = _choose(sampler, (yield from cache.run_ahead(token)), position, history, logit_rounding)
        mx.async_eval(last.arrays)
        cache.ran_ahead(last)


@dataclass(frozen=True, eq=False)
class _Choice:
    """The target's own tokens at a proposal's places and behind it, from their logits and scores [n, vocabulary_size].

    `history` are the tokens for the penalties, up to the last place. `largest` [n] are the largest logits, NaN in a row
    with a NaN. `margins` are the margins and their bounds, [n] each, and empty under REJECTION.
    """

    logits: mx.array
    scores: mx.array
    history: mx.array | None
    accepted: mx.array
    own: mx.array
    largest: mx.array
    margins: tuple[mx.array, ...]

    @property
    def arrays(self) -> list[mx.array]:
        return [self.accepted, self.own, self.largest, *self.margins]


def _choose(
    sampler: Sampler,
    logits: mx.array,
    position: int,
    history: mx.array | None,
    logit_rounding: float,
    proposal: Sequence[int] = (),
    draft_probabilities: Rows | None = None,
    *,
    allowed: mx.array | None = None,
) -> _Choice:
    """Choose tokens from position `position` on, lazily, of those that are `allowed` [n, vocabulary_size]."""
    transformed = sampler.transformed(logits, position, history, allowed)
    scores = sampler.truncated(transformed)
    proposed = mx.array(list(proposal), mx.uint32)
    if sampler.rejects and proposal:
        assert draft_probabilities is not None
        accepted, own = accept_by_rejection(sampler, scores, position, proposed, mx.array(draft_probabilities))
    else:
        accepted, own = accept_coupled(sampler, scores, position, proposed)
    largest = mx.max(mx.abs(logits.astype(mx.float32)), axis=-1)
    margins = _margins(sampler, largest, transformed, scores, position, own, logit_rounding)
    return _Choice(logits, scores, history, accepted, own, largest, margins)


def _margins(
    sampler: Sampler,
    largest: mx.array,
    transformed: mx.array,
    scores: mx.array,
    position: int,
    chosen: mx.array,
    logit_rounding: float,
) -> tuple[mx.array, ...]:
    """Return the margins of the target's choices and their bounds, [n] each, lazily; nothing under REJECTION."""
    if sampler.rejects:
        return ()
    bounds = near_tie_bounds(sampler.sampling, largest, logit_rounding)
    noise = sampler.own_noise(position, scores.shape[0])
    change = bounds if logit_rounding >= COARSE_ROUNDING else None
    return choice_margins(sampler.sampling, transformed, scores, noise, chosen, change), bounds


def _near_ties(margins: tuple[mx.array, ...], num_emitted: int) -> list[Margin]:
    """Return the margins of the first tokens, with whether they are below their bounds."""
    if not margins:
        return []
    values, bounds = (each.tolist()[:num_emitted] for each in margins)  # type: ignore[index]
    return [Margin(value, value < bound) for value, bound in zip(values, bounds, strict=True)]


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

"""Rules of acceptance that are wrong in usual ways, which the statistics of emitted tokens must see."""

from __future__ import annotations

import mlx.core as mx

from specd.worker.sampling.noise import Purpose
from specd.worker.sampling.sampler import Sampler
from target_worker.acceptance import accept_by_rejection, accept_coupled, reject


def accept_with_p_alone(
    sampler: Sampler, scores: mx.array, position: int, proposal: mx.array, draft: mx.array
) -> tuple[mx.array, mx.array]:
    p = mx.take_along_axis(sampler.probabilities(scores)[:-1], proposal[:, None], axis=-1)[:, 0]
    accepted = sampler.noise.uniform(Purpose.ACCEPT, position, proposal.size) < p
    return accepted, accept_by_rejection(sampler, scores, position, proposal, draft)[1]


def recover_from_p(
    sampler: Sampler, scores: mx.array, position: int, proposal: mx.array, draft: mx.array
) -> tuple[mx.array, mx.array]:
    accepted, _ = accept_by_rejection(sampler, scores, position, proposal, draft)
    return accepted, sampler.choose(scores, sampler.own_noise(position, scores.shape[0]))


def recover_without_normalising(
    sampler: Sampler, scores: mx.array, position: int, proposal: mx.array, draft: mx.array
) -> tuple[mx.array, mx.array]:
    accepted, _ = accept_by_rejection(sampler, scores, position, proposal, draft)
    residual = mx.maximum(sampler.probabilities(scores) - mx.concatenate([draft, draft[-1:]]), 0)
    uniform = sampler.noise.uniform(Purpose.SAMPLE, position, scores.shape[0])
    own = mx.sum(mx.cumsum(residual, axis=-1) <= uniform[:, None], axis=-1)
    return accepted, mx.minimum(own, scores.shape[-1] - 1)


def recover_with_the_drafts_noise(
    sampler: Sampler, scores: mx.array, position: int, proposal: mx.array, draft: mx.array
) -> tuple[mx.array, mx.array]:
    accepted, recovered = reject(
        sampler.probabilities(scores)[:-1],
        draft,
        proposal,
        uniform=sampler.noise.uniform(Purpose.ACCEPT, position, proposal.size),
        noise=sampler.draft_noise(position, proposal.size),
    )
    return accepted, mx.concatenate([recovered, recovered[-1:]])


def recover_with_fresh_noise(
    sampler: Sampler, scores: mx.array, position: int, proposal: mx.array, draft: mx.array
) -> tuple[mx.array, mx.array]:
    accepted, _ = accept_coupled(sampler, scores, position, proposal)
    return accepted, sampler.choose(scores, sampler.noise.gumbel(Purpose.PROPOSE, position, scores.shape[0]))

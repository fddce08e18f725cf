"""The acceptance rules: which proposed tokens the target accepts, and which token is its own.

Both work on rows, one for each proposed token and one for the position after them. They return for each proposed token
whether it is accepted, and for each position the target's own token, which the round emits if all proposed tokens
before it are accepted and the one at its position is not. Only rows up to the first rejection count.
"""

from __future__ import annotations

import mlx.core as mx

from specd.worker.sampling.noise import Purpose
from specd.worker.sampling.sampler import Sampler


def accept_coupled(sampler: Sampler, scores: mx.array, position: int, proposal: mx.array) -> tuple[mx.array, mx.array]:
    """Accept the proposed tokens [k] that are the target's own choices from the scores [k + 1, vocabulary_size].

    Drafter-invariant: the target's choices depend on the seed and the position only (Daliri, Musco, Suresh,
    arXiv 2408.07978, algorithm 4, with Gumbel noise). With temperature 0 this is greedy speculative decoding.
    Returns which tokens are accepted [k], and the target's own tokens [k + 1].
    """
    own = sampler.choose(scores, sampler.own_noise(position, scores.shape[0]))
    return own[:-1] == proposal, own


def accept_by_rejection(
    sampler: Sampler, scores: mx.array, position: int, proposal: mx.array, draft_probabilities: mx.array
) -> tuple[mx.array, mx.array]:
    """Accept each proposed token [k] with probability min(1, p / q + lenience); see `reject`.

    The proposal was sampled from `draft_probabilities` [k, vocabulary_size].
    Returns which tokens are accepted [k], and the target's own tokens [k + 1]: recovered ones, and the bonus token.
    """
    num_draft_tokens = proposal.size
    probabilities = sampler.probabilities(scores)
    noise = sampler.own_noise(position, num_draft_tokens + 1)
    accepted, recovered = reject(
        probabilities[:-1],
        draft_probabilities,
        proposal,
        uniform=sampler.noise.uniform(Purpose.ACCEPT, position, num_draft_tokens),
        noise=noise[:-1] if noise is not None else None,
        lenience=sampler.sampling.lenience,
    )
    bonus = sampler.choose(scores[-1:], noise[-1:] if noise is not None else None)
    return accepted, mx.concatenate([recovered, bonus])


def reject(
    target: mx.array,
    draft: mx.array,
    proposal: mx.array,
    *,
    uniform: mx.array,
    noise: mx.array | None,
    lenience: float = 0.0,
) -> tuple[mx.array, mx.array]:
    """Accept tokens x ~ q with probability min(1, p(x) / q(x) + lenience), and sample those to put in their places.

    The replacements are samples of norm(max(p - q, 0)), which makes accepted and recovered tokens together samples of p
    (Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318, equation 2). `lenience` is the
    `delta` of the first MLX example of speculative decoding.

    `target` is p and `draft` q, both [n, vocabulary_size]; `proposal` [n] is x; `uniform` [n] and `noise`
    [n, vocabulary_size], Gumbel, are independent of how x was sampled; without noise the most likely token is taken.
    """
    column = proposal[:, None]
    p, q = (mx.take_along_axis(distribution, column, axis=-1)[:, 0] for distribution in (target, draft))
    accepted = uniform * q < p + lenience * q
    residual = mx.maximum(target - draft, 0)
    # Where p = q nothing is rejected, but for rounding.
    residual = mx.where(mx.any(residual > 0, axis=-1, keepdims=True), residual, target)
    scores = mx.log(residual)  # the Gumbel-max trick needs no normalisation
    return accepted, mx.argmax(scores if noise is None else scores + noise, axis=-1)

"""Tokens emitted by a rule of acceptance, their exact distribution, and the chi-square test of one against the other.

A test fails where its p-value is below ALPHA. There are about 500 of them, so that a right sampler would fail one of
them with a probability below 1e-3; and as the seeds are fixed, a test that passes once passes always. What the tests
can see is tested too: the same statistics on rules that are wrong in usual ways must have p-values below POWER.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from scipy import stats

from specd.sampling import Acceptance, Sampling
from specd.worker.sampling.sampler import Sampler
from target_worker.acceptance import accept_by_rejection, accept_coupled

ALPHA = 1e-6
POWER = 1e-9

# Where the samples begin, one a position: anywhere but at the start.
POSITION = 17
# The tokens before all of them, as the penalties see them.
HISTORY = [2, 0, 4, 7, 7, 1, 4, 4]

BOTH = list(Acceptance)

Floats = NDArray[np.float64]
Rule = Callable[[Sampler, mx.array, int, mx.array, mx.array], tuple[mx.array, mx.array]]


def p_value(counts: Sequence[NDArray[np.int64]], expected: Sequence[Floats]) -> float:
    """Return the p-value of Pearson's chi-square test, its statistic summed over independent tables.

    `expected` are counts as well. The cells of a table that expect fewer than 5 are merged, with more until it is 5.
    """
    statistic, degrees = 0.0, 0
    for table, means in zip(counts, expected, strict=True):
        assert np.isclose(table.sum(), means.sum())
        if table[means == 0].any():
            return 0.0
        order = np.argsort(means)
        num_merged = max(np.searchsorted(means[order], 5), np.searchsorted(np.cumsum(means[order]), 5) + 1)
        observed, predicted = (
            np.append(cells[order][num_merged:], cells[order][:num_merged].sum()) for cells in (table, means)
        )
        statistic += float(((observed - predicted) ** 2 / predicted).sum())
        degrees += predicted.size - 1
    return float(stats.chi2.sf(statistic, degrees)) if degrees else 1.0


def exact_distribution(logits: Floats, s: Sampling, history: Sequence[int] = ()) -> Floats:
    """Return what sampling.proto says that a token is sampled from, written a second time, in float64."""
    x = logits.astype(np.float64)
    for token_id, bias in s.logit_bias.items():
        x[token_id] += bias
    recent = list(history)[-s.penalty_context_size :]
    for token_id in set(recent):
        x[token_id] = x[token_id] / s.repetition_penalty if x[token_id] > 0 else x[token_id] * s.repetition_penalty
    for token_id in set(recent):
        x[token_id] -= s.presence_penalty
    for token_id in recent:
        x[token_id] -= s.frequency_penalty
    x[list(s.suppressed_token_ids)] = -np.inf

    p = np.exp(x - x.max())
    p /= p.sum()
    most_likely_first = np.argsort(-p)
    mass_before = np.cumsum(p[most_likely_first]) - p[most_likely_first]
    p[most_likely_first[mass_before >= s.top_p]] = 0
    p[p < s.min_p * p.max()] = 0
    if s.top_k:
        p[most_likely_first[s.top_k :]] = 0
    if s.temperature == 0:
        return (np.arange(p.size) == p.argmax()).astype(np.float64)
    p = (p / p.max()) ** (1 / s.temperature)
    return p / p.sum()


def right_rule(acceptance: Acceptance) -> Rule:
    if acceptance is Acceptance.REJECTION:
        return accept_by_rejection
    return lambda sampler, scores, position, proposal, _: accept_coupled(sampler, scores, position, proposal)


def emit(sampler: Sampler, scores: mx.array, draft_scores: mx.array, rule: Rule | None = None) -> mx.array:
    """Return a token for each row of scores [n, size]: the proposed one where it is accepted, else the target's own.

    Rows are positions, as in one long round of which each place is looked at.
    """
    rule = rule or right_rule(sampler.sampling.acceptance)
    proposal = sampler.choose(draft_scores, sampler.draft_noise(POSITION, draft_scores.shape[0]))
    scores_and_bonus = mx.concatenate([scores, scores[-1:]])
    accepted, own = rule(sampler, scores_and_bonus, POSITION, proposal, sampler.probabilities(draft_scores))
    return mx.where(accepted, proposal, own[:-1])


TRANSFORMS: dict[str, Sampling] = {
    "none": Sampling(),
    "top_k": Sampling(top_k=4),
    "top_p": Sampling(top_p=0.8),
    "min_p": Sampling(min_p=0.1),
    "bias": Sampling(logit_bias={0: 2.5, 3: -1.5, 5: 1.0}),
    "repetition": Sampling(repetition_penalty=1.7),
    "presence": Sampling(presence_penalty=1.2),
    "frequency": Sampling(frequency_penalty=0.6),
    "short context": Sampling(frequency_penalty=-0.8, repetition_penalty=0.6, penalty_context_size=3),
    "suppressed": Sampling(suppressed_token_ids=(1, 6), suppressed_before=2**31),
    "truncations": Sampling(top_k=5, top_p=0.95, min_p=0.02),
    "all": Sampling(
        top_k=5,
        top_p=0.95,
        min_p=0.02,
        logit_bias={0: 2.5, 3: -1.5, 5: 1.0},
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        penalty_context_size=0,
        suppressed_token_ids=(6,),
        suppressed_before=2**31,
    ),
}

"""The token emitted at a position has the target's distribution, for any draft and transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from scipy import stats

from specd.sampling import Acceptance, Sampling
from specd.v1 import sampling_pb2
from specd.worker.sampling.noise import Noise, Purpose
from specd.worker.sampling.sampler import Sampler
from target_worker.acceptance import accept_by_rejection
from tests.thorough import examples
from tests.worker.emission import (
    ALPHA,
    BOTH,
    HISTORY,
    POSITION,
    POWER,
    TRANSFORMS,
    Floats,
    Rule,
    emit,
    exact_distribution,
    p_value,
    right_rule,
)
from tests.worker.wrong_rules import (
    accept_with_p_alone,
    recover_from_p,
    recover_with_fresh_noise,
    recover_with_the_drafts_noise,
    recover_without_normalising,
)

NUM_SAMPLES = 100_000
TEMPERATURES = [0.7, 1.5, 0.3, 1.0]


@pytest.fixture(autouse=True, scope="module")
def noise_is_drawn_once() -> Iterator[None]:
    """Keep the draws of the tests with many samples, which would take most of their time."""
    kept: dict[tuple[object, ...], mx.array] = {}

    def keeping(draw: Callable[[Noise, Purpose, int, int], mx.array]) -> Callable[..., mx.array]:
        def draw_once(self: Noise, purpose: Purpose, position: int, count: int) -> mx.array:
            if count not in (NUM_SAMPLES, NUM_SAMPLES + 1):
                return draw(self, purpose, position, count)
            key = (draw.__name__, self._seed, self._vocabulary_size, purpose, position)
            if key not in kept:
                kept[key] = draw(self, purpose, position, NUM_SAMPLES + 1)
                mx.eval(kept[key])
            return kept[key][:count]

        return draw_once

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Noise, "gumbel", keeping(Noise.gumbel))
        patch.setattr(Noise, "uniform", keeping(Noise.uniform))
        yield


def scores_of(sampler: Sampler, logits: Floats) -> mx.array:
    """Return scores [NUM_SAMPLES, size] for the same logits [size] and the same history at each position.

    One row is transformed for all of them; that rows do not mix is tested in test_sampling.py.
    """
    rows = mx.array(logits.astype(np.float32))[None]
    scores = sampler.scores(rows, POSITION, sampler.history(HISTORY[:5], HISTORY[5:]))
    return mx.broadcast_to(scores, (NUM_SAMPLES, logits.size))


def emit_many(sampling: Sampling, target: Floats, draft: Floats, rule: Rule | None = None) -> mx.array:
    """Return NUM_SAMPLES emitted tokens for the same logits [size] at each position."""
    sampler = Sampler(sampling, target.size)
    return emit(sampler, scores_of(sampler, target), scores_of(sampler, draft), rule)


def p_value_of(sampling: Sampling, target: Floats, draft: Floats, expected: Floats, rule: Rule | None = None) -> float:
    """Return the p-value of the emitted tokens for the same logits [size] at each position."""
    emitted = np.array(emit_many(sampling, target, draft, rule))
    return p_value([np.bincount(emitted, minlength=target.size)], [NUM_SAMPLES * expected])


# Logits of targets, and of drafts for them.

SIZES = [8, 13, 16]


@cache
def target_logits(size: int) -> Floats:
    return np.random.default_rng(size).normal(scale=1.5, size=size)


DRAFTS: dict[str, Callable[[Floats], Floats]] = {
    "equal": lambda target: target,
    "near": lambda target: target + np.random.default_rng(1).normal(scale=0.4, size=target.size),
    "far": lambda target: np.random.default_rng(2).normal(scale=2.0, size=target.size),
    "disjoint": lambda target: -3 * target,
}


TRUNCATING = ["top_k", "top_p", "min_p", "truncations"]


def test_every_parameter_that_changes_the_distribution_has_a_transform() -> None:
    """A parameter that no transform here sets could be read, sent and checked, and never used."""
    names = {each.name for each in sampling_pb2.SamplingParameters.DESCRIPTOR.fields}
    for name in names - {"temperature", "seed", "acceptance", "lenience"}:  # which other tests here vary
        assert any(getattr(sampling, name) != getattr(Sampling(), name) for sampling in TRANSFORMS.values()), name


@pytest.mark.slow
@pytest.mark.parametrize("temperature", examples(TEMPERATURES, 2))
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("acceptance", BOTH)
def test_emitted_tokens_have_the_targets_distribution(
    acceptance: Acceptance, transform: str, temperature: float
) -> None:
    sampling = replace(
        TRANSFORMS[transform],
        temperature=temperature,
        acceptance=acceptance,
        seed=list(TRANSFORMS).index(transform),
    )
    target = target_logits(13)
    expected = exact_distribution(target, sampling, HISTORY)
    for name, draft in DRAFTS.items():
        assert p_value_of(sampling, target, draft(target), expected) > ALPHA, f"{name} draft"


# All tokens but the likeliest two: a truncation before the mask would leave out others than one behind it.
ALLOWED = np.argsort(np.argsort(-target_logits(13))) >= 2


def emit_constrained(sampling: Sampling, target: Floats, draft: Floats, *, masks_first: bool = True) -> mx.array:
    """Return emitted tokens of a grammar with the same mask at each position. The draft has no mask."""
    sampler = Sampler(sampling, target.size)
    rows, allowed = mx.array(target.astype(np.float32))[None], mx.array(ALLOWED)[None]
    history = sampler.history(HISTORY[:5], HISTORY[5:])
    transformed = sampler.transformed(rows, POSITION, history, allowed if masks_first else None)
    scores = sampler.truncated(transformed)
    if not masks_first:
        scores = mx.where(allowed, scores, -mx.inf)
    return emit(sampler, mx.broadcast_to(scores, (NUM_SAMPLES, target.size)), scores_of(sampler, draft))


def constrained_p_value(sampling: Sampling, draft: Callable[[Floats], Floats], *, masks_first: bool = True) -> float:
    """Return the p-value of constrained tokens against the law of the allowed tokens alone, normalised."""
    target = target_logits(13)
    emitted = np.array(emit_constrained(sampling, target, draft(target), masks_first=masks_first))
    expected = exact_distribution(np.where(ALLOWED, target, -np.inf), sampling, HISTORY)
    return p_value([np.bincount(emitted, minlength=13)], [NUM_SAMPLES * expected])


@pytest.mark.slow
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("acceptance", BOTH)
def test_constrained_tokens_have_the_distribution_of_the_allowed_ones(acceptance: Acceptance, transform: str) -> None:
    seed = list(TRANSFORMS).index(transform)
    sampling = replace(TRANSFORMS[transform], temperature=0.9, acceptance=acceptance, seed=seed)
    for name, draft in DRAFTS.items():
        assert constrained_p_value(sampling, draft) > ALPHA, f"{name} draft"


@pytest.mark.parametrize("transform", TRUNCATING)
@pytest.mark.parametrize("acceptance", BOTH)
def test_a_mask_behind_the_truncations_would_be_seen(acceptance: Acceptance, transform: str) -> None:
    sampling = replace(TRANSFORMS[transform], temperature=0.9, acceptance=acceptance)
    assert constrained_p_value(sampling, DRAFTS["near"], masks_first=False) < POWER


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("acceptance", BOTH)
def test_the_size_of_the_vocabulary_does_not_matter(acceptance: Acceptance, size: int) -> None:
    sampling = Sampling(temperature=1.0, acceptance=acceptance, seed=2**64 - 1 - size)
    target = target_logits(size)
    expected = exact_distribution(target, sampling)
    for name, draft in DRAFTS.items():
        assert p_value_of(sampling, target, draft(target), expected) > ALPHA, f"{name} draft"


@pytest.mark.parametrize("transform", TRUNCATING)
def test_disjoint_means_disjoint(transform: str) -> None:
    """The tests above have a draft that only proposes what the target cannot give."""
    target = target_logits(13)
    sampling = replace(TRANSFORMS[transform], temperature=1.0)
    p, q = (exact_distribution(logits, sampling) for logits in (target, DRAFTS["disjoint"](target)))
    assert np.minimum(p, q).sum() == 0
    p, q = (exact_distribution(logits, Sampling(temperature=1.0)) for logits in (target, DRAFTS["disjoint"](target)))
    assert np.minimum(p, q).sum() < 0.05


@pytest.mark.parametrize("acceptance", BOTH)
def test_without_temperature_the_most_likely_token_is_emitted(acceptance: Acceptance) -> None:
    target = target_logits(13)
    for draft in DRAFTS.values():
        emitted = np.array(emit_many(Sampling(acceptance=acceptance), target, draft(target)))
        assert (emitted == target.argmax()).all()


@pytest.mark.parametrize("draft", DRAFTS)
def test_as_much_is_accepted_as_the_papers_promise(draft: str) -> None:
    """REJECTION: sum of min(p, q), arXiv 2211.17192, corollary 3.6. COUPLED: at least what arXiv 2408.07978 proves."""
    target = target_logits(13)
    for acceptance in BOTH:
        sampling = Sampling(temperature=1.0, acceptance=acceptance, seed=7)
        num_accepted: list[int] = []

        def counting(*arguments: Any, right: Rule, num_accepted: list[int]) -> tuple[mx.array, mx.array]:
            accepted, own = right(*arguments)
            num_accepted.append(int(np.sum(np.array(accepted))))
            return accepted, own

        rule = partial(counting, right=right_rule(acceptance), num_accepted=num_accepted)
        emit_many(sampling, target, DRAFTS[draft](target), rule)
        p, q = (exact_distribution(logits, sampling) for logits in (target, DRAFTS[draft](target)))
        common = min(np.minimum(p, q).sum(), 1)
        if acceptance is Acceptance.REJECTION:
            assert stats.binomtest(num_accepted[0], NUM_SAMPLES, common).pvalue > ALPHA
        else:
            least = common / (2 - common)
            assert stats.binomtest(num_accepted[0], NUM_SAMPLES, least, alternative="less").pvalue > ALPHA


def test_the_p_values_of_right_samples_are_uniform() -> None:
    generator = np.random.default_rng(0)
    p_values = []
    for _ in range(500):
        tables = generator.dirichlet(np.full(20, 0.7), size=5)
        p_values.append(p_value([generator.multinomial(400, table) for table in tables], list(400 * tables)))
    assert stats.kstest(p_values, stats.uniform.cdf).pvalue > ALPHA


# Lenience.


def lenient_distribution(p: Floats, q: Floats, lenience: float) -> Floats:
    """Return what REJECTION emits: accepted tokens, and the residual for those that are not."""
    taken = np.minimum(q, p + lenience * q)
    residual = np.maximum(p - q, 0)
    return taken + (1 - taken.sum()) * (residual / residual.sum() if residual.any() else p)


@pytest.mark.slow
@pytest.mark.parametrize("lenience", [0.0, 0.05, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("transform", ["none", "truncations"])
def test_lenience_gives_the_distribution_that_follows_from_it(transform: str, lenience: float) -> None:
    sampling = replace(
        TRANSFORMS[transform], temperature=0.8, seed=5, acceptance=Acceptance.REJECTION, lenience=lenience
    )
    target = target_logits(13)
    p = exact_distribution(target, sampling)
    for name, draft in DRAFTS.items():
        q = exact_distribution(draft(target), sampling)
        expected = lenient_distribution(p, q, lenience)
        assert lenience > 0 or np.allclose(expected, p)
        assert p_value_of(sampling, target, draft(target), expected) > ALPHA, f"{name} draft"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lenience_1_accepts_everything(temperature: float) -> None:
    sampling = Sampling(temperature=temperature, acceptance=Acceptance.REJECTION, lenience=1.0, top_k=4)

    def rule(*arguments: Any) -> tuple[mx.array, mx.array]:
        accepted, own = accept_by_rejection(*arguments)
        assert mx.all(accepted)
        return accepted, own

    for draft in DRAFTS.values():
        emit_many(sampling, target_logits(13), draft(target_logits(13)), rule)


@pytest.mark.parametrize(
    ("acceptance", "rule"),
    [
        (Acceptance.REJECTION, accept_with_p_alone),
        (Acceptance.REJECTION, recover_from_p),
        (Acceptance.REJECTION, recover_without_normalising),
        (Acceptance.REJECTION, recover_with_the_drafts_noise),
        (Acceptance.COUPLED, recover_with_fresh_noise),
    ],
)
def test_a_wrong_rule_is_seen(acceptance: Acceptance, rule: Rule) -> None:
    sampling = Sampling(temperature=1.0, acceptance=acceptance, seed=3)
    target = target_logits(13)
    p = p_value_of(sampling, target, DRAFTS["far"](target), exact_distribution(target, sampling), rule)
    print(rule.__name__, p)
    assert p < POWER

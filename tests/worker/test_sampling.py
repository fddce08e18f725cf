"""The choice of tokens, piece by piece; under COUPLED only the seed decides about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import sample_utils
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from specd.sampling import (
    Acceptance,
    Sampling,
)
from specd.worker.sampling.distribution import decode_distributions
from specd.worker.sampling.noise import Noise, Purpose
from specd.worker.sampling.sampler import Sampler
from specd.worker.session.proposal import propose
from specd.worker.session.session_cache import SessionCache
from target_worker.verification import Verification, verify
from tests.worker.driving import Chunks, finish
from tests.worker.emission import TRANSFORMS, exact_distribution
from tests.worker.models import TINY_VOCABULARY_SIZE, softened_model

pytestmark = pytest.mark.usefixtures("small_last_pass")

TARGET = softened_model(0, 0.15)
DRAFTS = [softened_model(seed, 0.15) for seed in (0, 1, 2)]

tokens = st.integers(0, TINY_VOCABULARY_SIZE - 1)
seeds = st.integers(0, 2**64 - 1)


def verify_in_one_go(
    cache: SessionCache, sampler: Sampler, position: int, token_ids: Sequence[int], proposal: Sequence[int] = ()
) -> Verification:
    return finish(verify(cache, sampler, position, token_ids, proposal, chunk=Chunks(3)))


def decode_alone(sampling: Sampling, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return what the target says without a draft."""
    cache, sampler = SessionCache(TARGET), Sampler(sampling, TINY_VOCABULARY_SIZE)
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(verify_in_one_go(cache, sampler, 0, token_ids).next_token_id)
    return token_ids[len(prompt) :]


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]

# Suppression ends in the middle of the generated tokens.
SAMPLINGS = {
    name: replace(sampling, suppressed_before=len(PROMPT) + 8) if sampling.suppressed_token_ids else sampling
    for name, sampling in TRANSFORMS.items()
}


def decode_with_mlx_lm(
    sampling: Sampling, prompt: Sequence[int], num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Return what mlx-lm's own loop and transforms give, with nothing of its own replaced but the random draw."""
    noise = Noise(sampling.seed, TINY_VOCABULARY_SIZE)
    position = len(prompt)

    def draw(log_probabilities: mx.array, temperature: float) -> mx.array:
        nonlocal position
        gumbel = noise.gumbel(Purpose.SAMPLE, position, 1)
        position += 1
        return mx.argmax(log_probabilities * (1 / temperature) + gumbel, axis=-1)

    def suppress(before: mx.array, logits: mx.array) -> mx.array:
        if before.size < sampling.suppressed_before:
            logits[:, mx.array(sampling.suppressed_token_ids)] = -mx.inf
        return logits

    monkeypatch.setattr(sample_utils, "categorical_sampling", draw)
    context_size = sampling.penalty_context_size or 10_000
    processors = make_logits_processors(
        dict(sampling.logit_bias),
        sampling.repetition_penalty,
        context_size,
        sampling.presence_penalty,
        context_size,
        sampling.frequency_penalty,
        context_size,
    )
    steps = generate_step(
        mx.array(list(prompt)),
        TARGET.network,
        max_tokens=num_tokens,
        sampler=make_sampler(sampling.temperature, sampling.top_p, sampling.min_p, top_k=sampling.top_k),
        logits_processors=[*processors, suppress] if sampling.suppressed_token_ids else processors,
    )
    return [int(token_id) for token_id, _ in steps]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
@pytest.mark.parametrize("transform", SAMPLINGS)
def test_the_target_alone_chooses_as_mlx_lm(
    transform: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in (0, 2**64 - 1):
        sampling = replace(SAMPLINGS[transform], temperature=temperature, seed=seed)
        expected = decode_with_mlx_lm(sampling, PROMPT, 30, monkeypatch)
        assert temperature == 0 or len(set(expected)) > 3
        assert decode_alone(sampling, PROMPT, 30) == expected


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5]),
    seed=seeds,
    top_k=st.sampled_from([0, 0, 6]),
    top_p=st.sampled_from([1.0, 1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.8]),
    frequency_penalty=st.sampled_from([0.0, -0.3]),
    penalty_context_size=st.sampled_from([0, 1, 4, 20]),
    logit_bias=st.dictionaries(tokens, st.floats(-3, 3, width=32), max_size=3),
    suppressed_token_ids=st.lists(tokens, max_size=3, unique=True).map(tuple),
    suppressed_before=st.integers(0, 25),
)


# Derandomized, because of a near-tie now and then: passes of different width round differently.
@settings(max_examples=80, derandomize=True)
@given(st.data(), samplings, st.lists(tokens, min_size=1, max_size=8))
def test_coupled_tokens_depend_on_the_seed_only(data: st.DataObject, sampling: Sampling, prompt: list[int]) -> None:
    num_tokens = 12
    expected = decode_alone(sampling, prompt, num_tokens)
    target, draft = SessionCache(TARGET), SessionCache(data.draw(st.sampled_from(DRAFTS)))
    sampler = Sampler(sampling, TINY_VOCABULARY_SIZE)
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + num_tokens:
        k = data.draw(st.integers(0, 8))
        # The sampler of a round has seen other rounds, or has not, as after a crash.
        if data.draw(st.booleans()):
            sampler = Sampler(sampling, TINY_VOCABULARY_SIZE)
        proposal = finish(propose(draft, sampler, 0, token_ids, k, chunk=Chunks(3)))
        assert not proposal.distributions
        position = data.draw(st.integers(0, min(target.cached_len, len(token_ids) - 1)))
        if target.token_ids[:position] != token_ids[:position]:
            position = 0
        verdict = verify_in_one_go(target, sampler, position, token_ids[position:], proposal.token_ids)
        token_ids += [*proposal.token_ids[: verdict.num_accepted], verdict.next_token_id]
    assert token_ids[len(prompt) :][:num_tokens] == expected


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_a_draft_that_is_the_target_is_always_accepted(temperature: float) -> None:
    for acceptance in Acceptance:
        sampling = replace(TRANSFORMS["all"], temperature=temperature, seed=9, acceptance=acceptance)
        target, draft = SessionCache(TARGET), SessionCache(TARGET)
        sampler = Sampler(sampling, TINY_VOCABULARY_SIZE)
        proposal = finish(propose(draft, sampler, 0, PROMPT, 8, chunk=Chunks(64)))
        rows = decode_distributions(proposal.distributions, TINY_VOCABULARY_SIZE)
        steps = verify(target, sampler, 0, PROMPT, proposal.token_ids, rows, chunk=Chunks(64))
        assert finish(steps).num_accepted == 8


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_rows_do_not_mix(transform: str, temperature: float) -> None:
    """Each row has the distribution that its logits, its history and its position give, alone."""
    num_rows, size, position = 6, 13, 40
    logits = np.random.default_rng(3).normal(scale=1.5, size=(num_rows, size)).astype(np.float32)
    before, between = [2, 0, 4, 7, 7, 1, 4, 4], [5, 4, 5, 12, 0]
    sampling = replace(TRANSFORMS[transform], temperature=temperature)
    if sampling.suppressed_token_ids:
        sampling = replace(sampling, suppressed_before=position + 2)
    sampler = Sampler(sampling, size)
    scores = sampler.scores(mx.array(logits), position, sampler.history(before[:6], before[6:], between))
    rows = np.array(sampler.probabilities(scores))
    for i in range(num_rows):
        alone = sampling if i < 2 else replace(sampling, suppressed_token_ids=())
        expected = exact_distribution(logits[i], alone, before + between[:i])
        np.testing.assert_allclose(rows[i], expected, atol=1e-5)


@pytest.mark.parametrize("offset", [-1000, 1000])
@pytest.mark.parametrize("transform", ["top_k", "top_p", "min_p", "truncations"])
def test_only_differences_between_logits_matter(transform: str, offset: float) -> None:
    logits = np.random.default_rng(3).normal(scale=1.5, size=13).astype(np.float32)
    sampling = replace(TRANSFORMS[transform], temperature=0.7)
    sampler = Sampler(sampling, logits.size)
    row = np.array(sampler.probabilities(sampler.scores(mx.array(logits[None] + offset), 0, None)))[0]
    np.testing.assert_allclose(row, exact_distribution(logits.astype(np.float64), sampling), atol=1e-3)


EXTREMES = {
    "coldest": Sampling(temperature=0.01),
    "hottest": Sampling(temperature=100.0),
    "least top_k": Sampling(temperature=1.0, top_k=1),
    "top_k all but one": Sampling(temperature=1.0, top_k=TINY_VOCABULARY_SIZE - 1),
    "most top_k": Sampling(temperature=1.0, top_k=2**32 - 1),
    "least top_p": Sampling(temperature=1.0, top_p=float(np.float32(1e-6))),
    "top_p almost 1": Sampling(temperature=1.0, top_p=float(np.nextafter(np.float32(1), np.float32(0)))),
    "least min_p": Sampling(temperature=1.0, min_p=float(np.float32(1e-45))),
    "most min_p": Sampling(temperature=1.0, min_p=1.0),
    "biases": Sampling(temperature=0.01, logit_bias={1: 100.0, 2: -100.0}),
    "most repetition_penalty": Sampling(temperature=0.01, repetition_penalty=10.0),
    "least repetition_penalty": Sampling(temperature=0.01, repetition_penalty=0.01),
    "penalties": Sampling(temperature=0.01, presence_penalty=2.0, frequency_penalty=2.0, penalty_context_size=0),
    "rewards": Sampling(temperature=0.01, presence_penalty=-2.0, frequency_penalty=-2.0, penalty_context_size=1),
    "longest context": Sampling(temperature=0.01, presence_penalty=1.0, penalty_context_size=2**31 - 1),
}


@pytest.mark.parametrize("sampling", EXTREMES.values(), ids=EXTREMES)
def test_extremes_give_a_distribution(sampling: Sampling) -> None:
    sampling.check(vocabulary_size=TINY_VOCABULARY_SIZE, model_name="tiny")
    sampler = Sampler(sampling, TINY_VOCABULARY_SIZE)
    logits = mx.array(np.random.default_rng(0).normal(scale=20, size=(2, TINY_VOCABULARY_SIZE)).astype(np.float32))
    scores = sampler.scores(logits, 5, sampler.history(list(range(16)) * 4, [3, 3], [7]))
    chosen = sampler.choose(scores, sampler.own_noise(5, 2))
    assert mx.all(mx.take_along_axis(scores, chosen[:, None], axis=-1) > -mx.inf)
    np.testing.assert_allclose(np.array(sampler.probabilities(scores)).sum(axis=-1), 1, atol=1e-5)

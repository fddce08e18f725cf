"""Log-probabilities of the tokens that come out."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from specd.sampling import (
    MAX_TOP_LOG_PROBABILITIES,
    RankedToken,
    Sampling,
)
from specd.worker.sampling.sampler import Sampler
from specd.worker.session.session_cache import SessionCache
from target_worker.log_probabilities import log_probabilities
from tests.worker.emission import TRANSFORMS, exact_distribution
from tests.worker.models import TINY_VOCABULARY_SIZE
from tests.worker.test_sampling import PROMPT, TARGET, decode_alone, verify_in_one_go

pytestmark = pytest.mark.usefixtures("small_last_pass")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_log_probabilities_are_those_of_the_tokens(transform: str, temperature: float) -> None:
    top = 5
    sampling = replace(TRANSFORMS[transform], temperature=temperature, seed=4, top_log_probabilities=top)
    proposal = decode_alone(replace(sampling, top_log_probabilities=None), PROMPT, 3)
    proposal[2] = (proposal[2] + 1) % TINY_VOCABULARY_SIZE  # is not accepted
    verdict = verify_in_one_go(
        SessionCache(TARGET), Sampler(sampling, TINY_VOCABULARY_SIZE), 0, PROMPT, [*proposal, 0, 0]
    )
    assert verdict.num_accepted == 2
    emitted = [*proposal[:2], verdict.next_token_id]
    assert len(verdict.log_probabilities) == len(emitted)

    logits = np.array(TARGET.network(mx.array([[*PROMPT, *emitted]]))[0], np.float64)
    for i, (token_id, got) in enumerate(zip(emitted, verdict.log_probabilities, strict=True)):
        row = logits[len(PROMPT) - 1 + i]
        model = row - np.log(np.exp(row).sum())
        history = [*PROMPT, *emitted[:i]]
        with np.errstate(divide="ignore"):
            sampled = np.log(exact_distribution(row, sampling, history))
        if temperature == 0:
            assert got.sampling == 0
            assert got.top_sampling == [RankedToken(token_id, 0.0)]
        assert got.model == pytest.approx(model[token_id], abs=1e-4)
        assert got.sampling == pytest.approx(sampled[token_id], abs=1e-4)
        for ranked, values in ((got.top_model, model), (got.top_sampling, sampled)):
            order = [int(token) for token in np.argsort(-values)[:top] if values[token] > -np.inf]
            assert [token.token_id for token in ranked] == order
            assert [token.log_probability for token in ranked] == pytest.approx(values[order], abs=1e-4)


@pytest.mark.parametrize("num_accepted", [0, 2])
def test_each_emitted_token_has_log_probabilities(num_accepted: int) -> None:
    sampling = Sampling(temperature=1.0, seed=4)
    proposal = decode_alone(sampling, PROMPT, 2)
    if num_accepted == 0:
        proposal[0] = (proposal[0] + 1) % TINY_VOCABULARY_SIZE
    for top in (None, 0, 1, MAX_TOP_LOG_PROBABILITIES):
        sampler = Sampler(replace(sampling, top_log_probabilities=top), TINY_VOCABULARY_SIZE)
        verdict = verify_in_one_go(SessionCache(TARGET), sampler, 0, PROMPT, proposal)
        assert verdict.num_accepted == num_accepted
        assert len(verdict.log_probabilities) == (0 if top is None else num_accepted + 1)
        for values in verdict.log_probabilities:
            assert len(values.top_model) == len(values.top_sampling) == min(top or 0, TINY_VOCABULARY_SIZE)


def ranks(logits: list[float], top: int, sampling: Sampling = Sampling(temperature=1.0)) -> list[int]:  # noqa: B008
    sampler = Sampler(sampling, len(logits))
    rows = mx.array([logits])
    (values,) = log_probabilities(sampler, rows, sampler.scores(rows, 0, None), [0], top)
    return [token.token_id for token in values.top_sampling]


def test_of_tokens_that_are_equally_likely_the_lower_id_comes_first() -> None:
    assert ranks([1, 3, 2, 3, 3, 2], 6) == [1, 3, 4, 2, 5, 0]
    assert ranks([1, 3, 2, 3, 3, 2], 2) == [1, 3]
    assert ranks([0.0] * 100, 5) == [0, 1, 2, 3, 4]
    for seed in range(20):
        logits = np.random.default_rng(seed).integers(0, 3, 64).astype(float)
        assert ranks(logits.tolist(), 5) == np.lexsort((np.arange(64), -logits))[:5].tolist()


def test_the_ranks_leave_out_what_cannot_be_sampled() -> None:
    assert ranks([1, 5, 4, 3, 2], 4, Sampling(temperature=1.0, top_k=2)) == [1, 2]
    sampling = Sampling(temperature=1.0, suppressed_token_ids=(1,), suppressed_before=1)
    assert ranks([1, 5, 4, 3, 2], 4, sampling) == [2, 3, 4, 0]
    assert ranks([1, 5, 4, 3, 2], 4, Sampling()) == [1]

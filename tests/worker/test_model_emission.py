"""The tokens that models emit have the target's distribution: tiny models over several positions, and the pair."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from numpy.typing import NDArray

from specd.sampling import Acceptance, Sampling
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.text.tokenizer import Tokenizer
from specd.worker.model.loader import LoadedModel, load
from specd.worker.sampling import noise
from specd.worker.sampling.distribution import decode_distributions
from specd.worker.sampling.sampler import Sampler
from specd.worker.session.proposal import propose
from specd.worker.session.session_cache import SessionCache
from target_worker.verification import verify
from tests.conftest import PROMPTS
from tests.worker.driving import Chunks, finish
from tests.worker.emission import ALPHA, BOTH, POSITION, POWER, Floats, Rule, emit, exact_distribution, p_value
from tests.worker.models import TINY_VOCABULARY_SIZE, softened_model
from tests.worker.wrong_rules import recover_from_p, recover_with_fresh_noise

# Several positions, through propose and verify on tiny models.

TARGET = softened_model(0, 0.2)
PROMPT = [3, 1, 4, 1, 5]
NUM_EMITTED = 3
NUM_SESSIONS = 600
# With penalties, which depend on the tokens proposed before, and a token that is suppressed only once.
IN_SESSIONS = Sampling(
    temperature=1.0,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    penalty_context_size=6,
    suppressed_token_ids=(2, 11),
    suppressed_before=len(PROMPT) + 1,
)


@cache
def blurred_target() -> LoadedModel:
    """Return a draft that agrees with the target often, and often does not."""
    model = softened_model(0, 0.2)
    mx.random.seed(1)
    blurred = tree_map(lambda weight: weight + 0.05 * mx.random.normal(weight.shape), model.network.parameters())
    model.network.update(blurred)
    mx.eval(blurred)
    return model


@cache
def exact_joint_distribution() -> Floats:
    """Return the probabilities [16, 16, 16] of the first three tokens, from the target's logits after each prefix."""
    joint = np.ones(())
    for length in range(NUM_EMITTED):
        prefixes = list(itertools.product(range(TINY_VOCABULARY_SIZE), repeat=length))
        logits = TARGET.network(mx.array([[*PROMPT, *prefix] for prefix in prefixes]))[:, -1]
        is_suppressed = len(PROMPT) + length < IN_SESSIONS.suppressed_before
        sampling = IN_SESSIONS if is_suppressed else replace(IN_SESSIONS, suppressed_token_ids=())
        rows = [
            exact_distribution(row, sampling, [*PROMPT, *prefix])
            for row, prefix in zip(np.array(logits), prefixes, strict=True)
        ]
        joint = joint[..., None] * np.array(rows).reshape((TINY_VOCABULARY_SIZE,) * (length + 1))
    return joint


def emit_in_sessions(acceptance: Acceptance, num_sessions: int) -> NDArray[np.int64]:
    """Count the first tokens [16, 16, 16] of sessions with a seed of their own each, in rounds of 3 proposed tokens."""
    target, draft = SessionCache(TARGET), SessionCache(blurred_target())
    counts = np.zeros((TINY_VOCABULARY_SIZE,) * NUM_EMITTED, np.int64)
    num_accepted = num_recovered = 0
    for seed in range(num_sessions):
        sampler = Sampler(replace(IN_SESSIONS, acceptance=acceptance, seed=seed), TINY_VOCABULARY_SIZE)
        token_ids = list(PROMPT)
        while len(token_ids) < len(PROMPT) + NUM_EMITTED:
            proposal = finish(propose(draft, sampler, 0, token_ids, 3, chunk=Chunks(64)))
            rows = decode_distributions(proposal.distributions, TINY_VOCABULARY_SIZE)
            verdict = finish(verify(target, sampler, 0, token_ids, proposal.token_ids, rows, chunk=Chunks(64)))
            token_ids += [*proposal.token_ids[: verdict.num_accepted], verdict.next_token_id]
            num_accepted += verdict.num_accepted
            num_recovered += verdict.num_accepted < len(proposal.token_ids)
        counts[tuple(token_ids[len(PROMPT) :][:NUM_EMITTED])] += 1
    print(f"{num_accepted} accepted, {num_recovered} recovered")
    assert min(num_accepted, num_recovered) > num_sessions / 2
    return counts


def joint_p_values(counts: NDArray[np.int64]) -> list[float]:
    """Return the p-values for the three tokens together, which have many rare cells, and for each two of them."""
    joint = exact_joint_distribution()
    tables = [(counts, joint), *((counts.sum(axis), joint.sum(axis)) for axis in range(NUM_EMITTED))]
    return [p_value([observed.ravel()], [counts.sum() * table.ravel()]) for observed, table in tables]


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", BOTH)
def test_tokens_that_follow_one_another_have_the_targets_joint_distribution(acceptance: Acceptance) -> None:
    p_values = joint_p_values(emit_in_sessions(acceptance, NUM_SESSIONS))
    print(p_values)
    assert min(p_values) > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", BOTH)
def test_the_same_noise_at_every_position_is_seen(acceptance: Acceptance, monkeypatch: pytest.MonkeyPatch) -> None:
    key = noise._key
    monkeypatch.setattr(noise, "_key", lambda seed, position, purpose: key(seed, 0, purpose))
    p_values = joint_p_values(emit_in_sessions(acceptance, NUM_SESSIONS))
    print(p_values)
    assert min(p_values) < POWER


# The embedded pair.

NUM_CONTEXTS = 300
NUM_CONTEXT_SAMPLES = 400
NUM_CANDIDATES = 64


@cache
def embedded_logits() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the target's and the draft's logits [NUM_CONTEXTS, NUM_CANDIDATES] inside the short prompts.

    In each context, only the tokens stay to which one of the two models gives the most probability.
    """
    target, draft = load(EMBEDDED_TARGET, blas=""), load(EMBEDDED_DRAFT, blas="")
    tokenizer = Tokenizer(target.tokenizer_json)
    texts = [tokenizer.encode(path.read_text())[:128] for path in PROMPTS[:8]]
    p, q = (
        np.concatenate([np.array(model.network(mx.array([text]))[0]) for text in texts]) for model in (target, draft)
    )
    contexts = np.linspace(0, len(p) - 1, NUM_CONTEXTS).astype(int)
    p, q = p[contexts], q[contexts]
    likely = np.maximum(*(np.array(mx.softmax(mx.array(logits), axis=-1)) for logits in (p, q)))
    candidates = np.argsort(-likely, axis=-1)[:, :NUM_CANDIDATES]
    return np.take_along_axis(p, candidates, axis=-1), np.take_along_axis(q, candidates, axis=-1)


def embedded_p_value(sampling: Sampling, rule: Rule | None = None) -> float:
    sampler = Sampler(sampling, NUM_CANDIDATES)
    scores, draft_scores = (
        mx.repeat(sampler.scores(mx.array(logits), POSITION, None), NUM_CONTEXT_SAMPLES, axis=0)
        for logits in embedded_logits()
    )
    emitted = np.array(emit(sampler, scores, draft_scores, rule)).reshape(NUM_CONTEXTS, NUM_CONTEXT_SAMPLES)
    counts = [np.bincount(row, minlength=NUM_CANDIDATES) for row in emitted]
    return p_value(counts, [NUM_CONTEXT_SAMPLES * exact_distribution(row, sampling) for row in embedded_logits()[0]])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("acceptance", BOTH)
def test_the_embedded_pair_emits_the_targets_distribution(acceptance: Acceptance, temperature: float) -> None:
    for sampling in (Sampling(), Sampling(top_k=50), Sampling(top_p=0.95)):
        p = embedded_p_value(replace(sampling, temperature=temperature, acceptance=acceptance, seed=11))
        print(p)
        assert p > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize(
    ("acceptance", "rule"), [(Acceptance.REJECTION, recover_from_p), (Acceptance.COUPLED, recover_with_fresh_noise)]
)
def test_a_wrong_rule_is_seen_on_the_embedded_pair(acceptance: Acceptance, rule: Rule) -> None:
    assert embedded_p_value(Sampling(temperature=1.0, acceptance=acceptance, seed=11), rule) < POWER

"""What is emitted has the target's distribution, whatever the draft: chi-square tests against exact probabilities.

A test fails where its p-value is below ALPHA. There are about 500 of them, so that a right sampler would fail one of
them with a probability below 1e-3; and as the seeds are fixed, a test that passes once passes always. What the tests
can see is tested too: the same statistics on rules that are wrong in usual ways must have p-values below POWER.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from numpy.typing import NDArray
from scipy import stats

from coordinator.tokenizer import Tokenizer
from draft_worker.proposal import propose
from draft_worker.session import DraftSession
from specd.sampling import Acceptance, Sampling
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.worker import noise
from specd.worker.distribution import decode_distributions
from specd.worker.model import LoadedModel, load
from specd.worker.noise import Noise, Purpose
from specd.worker.sampler import Sampler
from specd.worker.session_cache import SessionCache
from target_worker.acceptance import accept_by_rejection, accept_coupled, reject
from target_worker.verification import verify
from tests.conftest import PROMPTS
from tests.driving import Chunks, finish
from tests.models import TINY_VOCABULARY_SIZE, tiny_model

ALPHA = 1e-6
POWER = 1e-9
NUM_SAMPLES = 100_000

# Where the samples begin, one a position: anywhere but at the start.
POSITION = 17
# The tokens before all of them, as the penalties see them.
HISTORY = [2, 0, 4, 7, 7, 1, 4, 4]

BOTH = list(Acceptance)
TEMPERATURES = [0.3, 0.7, 1.0, 1.5]

Floats = NDArray[np.float64]
Rule = Callable[[Sampler, mx.array, int, mx.array, mx.array], tuple[mx.array, mx.array]]


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


def count(tokens: mx.array, size: int) -> NDArray[np.int64]:
    return np.bincount(np.array(tokens), minlength=size)


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


def scores_of(sampler: Sampler, logits: Floats) -> mx.array:
    """Return scores [NUM_SAMPLES, size] for the same logits [size] and the same history at each position.

    One row is transformed for all of them; that rows do not mix is tested in test_sampling.py.
    """
    rows = mx.array(logits.astype(np.float32))[None]
    scores = sampler.scores(rows, POSITION, sampler.history(HISTORY[:5], HISTORY[5:]))
    return mx.broadcast_to(scores, (NUM_SAMPLES, logits.size))


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


def emit_many(sampling: Sampling, target: Floats, draft: Floats, rule: Rule | None = None) -> mx.array:
    """Return NUM_SAMPLES emitted tokens for the same logits [size] at each position."""
    sampler = Sampler(sampling, target.size)
    return emit(sampler, scores_of(sampler, target), scores_of(sampler, draft), rule)


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
TRUNCATING = ["top_k", "top_p", "min_p", "truncations"]


@pytest.mark.parametrize("temperature", TEMPERATURES)
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
    expected = NUM_SAMPLES * exact_distribution(target, sampling, HISTORY)
    for name, draft in DRAFTS.items():
        emitted = emit_many(sampling, target, draft(target))
        assert p_value([count(emitted, target.size)], [expected]) > ALPHA, f"{name} draft"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("acceptance", BOTH)
def test_the_size_of_the_vocabulary_does_not_matter(acceptance: Acceptance, size: int) -> None:
    sampling = Sampling(temperature=1.0, acceptance=acceptance, seed=2**64 - 1 - size)
    target = target_logits(size)
    expected = NUM_SAMPLES * exact_distribution(target, sampling)
    for name, draft in DRAFTS.items():
        emitted = emit_many(sampling, target, draft(target))
        assert p_value([count(emitted, size)], [expected]) > ALPHA, f"{name} draft"


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
        num_accepted = []

        def counting(*arguments: Any, right: Rule, num_accepted: list[int]) -> tuple[mx.array, mx.array]:
            accepted, own = right(*arguments)
            num_accepted.append(mx.sum(accepted).item())
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
        emitted = emit_many(sampling, target, draft(target))
        assert p_value([count(emitted, target.size)], [NUM_SAMPLES * expected]) > ALPHA, f"{name} draft"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lenience_1_accepts_everything(temperature: float) -> None:
    sampling = Sampling(temperature=temperature, acceptance=Acceptance.REJECTION, lenience=1.0, top_k=4)

    def rule(*arguments: Any) -> tuple[mx.array, mx.array]:
        accepted, own = accept_by_rejection(*arguments)
        assert mx.all(accepted)
        return accepted, own

    for draft in DRAFTS.values():
        emit_many(sampling, target_logits(13), draft(target_logits(13)), rule)


# Wrong rules, each of which one of the statistics above must see.


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
    emitted = emit_many(sampling, target, DRAFTS["far"](target), rule)
    p = p_value([count(emitted, target.size)], [NUM_SAMPLES * exact_distribution(target, sampling)])
    print(rule.__name__, p)
    assert p < POWER


# Several positions, through propose and verify on tiny models.


def softened_model(seed: int, sharpness: float) -> LoadedModel:
    """Make a tiny model that leaves something to chance: `tiny_model` nearly always knows what comes next."""
    model = tiny_model(seed)
    model.network.model.norm.weight = sharpness * model.network.model.norm.weight
    mx.eval(model.network.parameters())
    return model


TARGET = softened_model(0, 0.2)
PROMPT = [3, 1, 4, 1, 5]
NUM_EMITTED = 3
NUM_SESSIONS = 1500
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
            proposal = finish(propose(DraftSession(draft, sampler), 0, token_ids, 3, chunk=Chunks(64)))
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


@pytest.mark.parametrize("acceptance", BOTH)
def test_tokens_that_follow_one_another_have_the_targets_joint_distribution(acceptance: Acceptance) -> None:
    p_values = joint_p_values(emit_in_sessions(acceptance, NUM_SESSIONS))
    print(p_values)
    assert min(p_values) > ALPHA


@pytest.mark.parametrize("acceptance", BOTH)
def test_the_same_noise_at_every_position_is_seen(acceptance: Acceptance, monkeypatch: pytest.MonkeyPatch) -> None:
    key = noise._key
    monkeypatch.setattr(noise, "_key", lambda seed, position, purpose: key(seed, 0, purpose))
    p_values = joint_p_values(emit_in_sessions(acceptance, NUM_SESSIONS // 2))
    print(p_values)
    assert min(p_values) < POWER


# The embedded pair.

NUM_CONTEXTS = 300
NUM_CONTEXT_SAMPLES = 400
NUM_CANDIDATES = 64


@cache
def embedded_logits() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the target's and the draft's logits [NUM_CONTEXTS, NUM_CANDIDATES] inside the short prompts.

    Of the vocabulary only those tokens are left, a context, that one of the two models gives the most probability.
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


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("acceptance", BOTH)
def test_the_embedded_pair_emits_the_targets_distribution(acceptance: Acceptance, temperature: float) -> None:
    for sampling in (Sampling(), Sampling(top_k=50), Sampling(top_p=0.95)):
        p = embedded_p_value(replace(sampling, temperature=temperature, acceptance=acceptance, seed=11))
        print(p)
        assert p > ALPHA


@pytest.mark.parametrize(
    ("acceptance", "rule"), [(Acceptance.REJECTION, recover_from_p), (Acceptance.COUPLED, recover_with_fresh_noise)]
)
def test_a_wrong_rule_is_seen_on_the_embedded_pair(acceptance: Acceptance, rule: Rule) -> None:
    assert embedded_p_value(Sampling(temperature=1.0, acceptance=acceptance, seed=11), rule) < POWER

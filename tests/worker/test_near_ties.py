"""A choice that a pass of another width may make otherwise is a near tie, and no other choice is one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.nn.layers.base import Module
from mlx.utils import tree_map

from specd.rpc.messages import margin_from, to_margin
from specd.sampling import Acceptance, Margin, Sampling
from specd.settings import EMBEDDED_TARGET
from specd.v1 import target_pb2
from specd.worker.cpu.openblas import load_blas
from specd.worker.engine.forward import enable_batches
from specd.worker.engine.jobs import Evaluate, Steps
from specd.worker.model import calibration
from specd.worker.model.calibration import PROPOSALS, VERIFIES, Workload, calibrate
from specd.worker.model.loader import LoadedModel, load
from specd.worker.model.rounding import measure_rounding
from specd.worker.sampling.margin import best_two, choice_margins, confidence_of, near_tie_bounds
from specd.worker.sampling.sampler import Sampler
from specd.worker.session.session_cache import SessionCache
from target_worker.verification import Verification, verify
from tests.conftest import TWENTY_PROMPTS
from tests.thorough import examples
from tests.worker.driving import Chunks, finish
from tests.worker.emission import TRANSFORMS
from tests.worker.models import softened_model, tiny_model

SIZE = 13
POSITION = 40
HISTORY = [2, 0, 4, 7, 7, 1, 4, 4]
TRUNCATIONS = [name for name, sampling in TRANSFORMS.items() if sampling.truncates]
MARGIN_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Choice:
    """What is chosen from rows of logits, with its margins and bounds."""

    token_ids: np.ndarray
    margins: np.ndarray
    bounds: np.ndarray
    totals: np.ndarray


def choose(sampling: Sampling, logits: np.ndarray, rounding: float = 0.0) -> Choice:
    """Choose a token from each row [n, SIZE], with the noise of successive positions, as the target does."""
    sampler = Sampler(sampling, SIZE)
    rows = mx.array(logits.astype(np.float32))
    transformed = sampler.transformed(rows, POSITION, sampler.history(HISTORY, [], [3] * (len(logits) - 1)))
    scores = sampler.truncated(transformed)
    noise = sampler.own_noise(POSITION, len(logits))
    chosen = sampler.choose(scores, noise)
    bounds = near_tie_bounds(sampling, mx.max(mx.abs(rows), axis=-1), rounding)
    margins = choice_margins(sampling, transformed, scores, noise, chosen, bounds)
    totals = scores if noise is None else scores + noise
    return Choice(*map(np.array, (chosen, margins, bounds, totals)))


# The margin.


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.5])
@pytest.mark.parametrize("name", [name for name in TRANSFORMS if name not in TRUNCATIONS])
def test_without_truncations_the_margin_is_the_difference_between_the_best_two(name: str, temperature: float) -> None:
    logits = np.random.default_rng(1).normal(scale=2, size=(40, SIZE))
    choice = choose(replace(TRANSFORMS[name], temperature=temperature, seed=3), logits)
    second, best = np.sort(choice.totals, axis=-1)[:, -2:].T
    np.testing.assert_allclose(choice.margins, best - second, atol=1e-5)
    assert not choice.bounds.any()


@pytest.mark.parametrize("name", TRANSFORMS)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.5]),
    rounding=st.sampled_from([1e-3, 0.01, 0.03]),
    scale=st.sampled_from([0.5, 2.0, 6.0]),
)
def test_a_choice_that_rounding_can_change_is_a_near_tie(
    name: str, seed: int, temperature: float, rounding: float, scale: float
) -> None:
    """Change all logits by the rounding, in random directions: the choice stays the same where it is no near tie."""
    random = np.random.default_rng(seed)
    sampling = replace(TRANSFORMS[name], temperature=temperature, seed=seed)
    logits = random.normal(scale=scale, size=(32, SIZE))
    choice = choose(sampling, logits, rounding)
    most = rounding * np.abs(logits).max(axis=-1, keepdims=True)
    is_near_tie = choice.margins < choice.bounds + MARGIN_TOLERANCE  # float32 has a rounding of its own
    for _ in range(4):
        signs = random.choice([-1.0, 1.0], size=logits.shape)
        other = choose(sampling, logits + most * signs)
        assert is_near_tie[other.token_ids != choice.token_ids].all()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", ["none", "bias", "presence", "frequency", "suppressed"])
def test_rounding_can_change_each_near_tie(name: str, temperature: float) -> None:
    """Change the best two towards each other, by the rounding: of these and no others the choice changes."""
    sampling = replace(TRANSFORMS[name], temperature=temperature, seed=5)
    logits = np.random.default_rng(2).normal(scale=2, size=(300, SIZE))
    choice = choose(sampling, logits, 0.01)
    most = 0.01 * np.abs(logits).max(axis=-1)
    best = np.argsort(choice.totals, axis=-1)
    rows, changed = np.arange(len(logits)), logits.copy()
    changed[rows, best[:, -1]] -= most
    changed[rows, best[:, -2]] += most
    flips = choose(sampling, changed).token_ids != choice.token_ids
    assert flips.any()
    np.testing.assert_array_equal(flips, choice.margins < choice.bounds)


def test_few_choices_of_a_truncation_are_near_ties() -> None:
    logits = np.random.default_rng(4).normal(scale=3, size=(2000, SIZE))
    for name in TRUNCATIONS:
        choice = choose(replace(TRANSFORMS[name], temperature=1.0, seed=6), logits, 1e-3)
        share = float((choice.margins < choice.bounds).mean())
        assert 0 < share < 0.05, name


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_only_possible_token_has_an_infinite_margin_which_travels(temperature: float) -> None:
    others = tuple(i for i in range(SIZE) if i != 4)
    sampling = Sampling(temperature=temperature, suppressed_token_ids=others, suppressed_before=POSITION + 9)
    choice = choose(sampling, np.ones((3, SIZE)), 0.5)
    assert choice.token_ids.tolist() == [4] * 3
    assert choice.margins.tolist() == [math.inf] * 3
    truncated = replace(sampling, top_k=3, top_p=0.9, min_p=0.1)
    assert choose(truncated, np.ones((3, SIZE)), 0.5).margins.tolist() == [math.inf] * 3
    message = target_pb2.Margin.FromString(to_margin(Margin(math.inf)).SerializeToString())
    assert margin_from(message) == Margin(math.inf)


def test_the_best_two_are_the_best_two_and_equal_ones_have_no_margin() -> None:
    rows = mx.array([[1.0, 5.0, 3.0], [2.0, 2.0, 2.0], [-mx.inf, -1.0, -mx.inf]])
    best = best_two(rows, mx.argmax(rows, axis=-1))
    assert best.tolist() == [[5.0, 3.0], [2.0, 2.0], [-1.0, -math.inf]]
    assert [confidence_of(best[i : i + 1]) for i in range(3)] == [pytest.approx(1 / (1 + math.exp(-2))), 0.5, 1.0]


# The rounding.


class Rounded(Module):
    """A network with an error in its logits, up to a share of the largest, which depends on the width of the pass."""

    def __init__(self, network: Module, rounding: float) -> None:
        super().__init__()
        self.network, self.layers, self.rounding = network, network.layers, rounding

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        logits = self.network(tokens, cache=cache)
        width = tokens.size
        # Each token has an error of its own, and the first of a wide pass another than the only one of a narrow pass.
        keys = [mx.random.key(1000 * width + i) for i in range(width)]
        error = mx.stack([mx.random.uniform(-1, 1, (logits.shape[-1],), key=key) for key in keys])
        largest = mx.max(mx.abs(logits), axis=-1, keepdims=True)
        return logits + self.rounding * largest * error.reshape(logits.shape)


def rounded_model(rounding: float) -> LoadedModel:
    model = softened_model(0, 0.3)
    return replace(model, network=Rounded(model.network, rounding), batches=False)


@pytest.mark.parametrize("rounding", [1e-4, 1e-2])
def test_the_rounding_of_a_model_is_measured(rounding: float) -> None:
    """Two errors in opposite directions are twice the error of one, and a few samples come close."""
    assert 1.7 * rounding < finish(measure_rounding(rounded_model(rounding), 60.0)) <= 2.05 * rounding


def test_the_same_bits_in_all_passes_have_no_rounding() -> None:
    model = tiny_model()

    class Constant(Module):
        layers = model.network.layers

        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            for each in cache:
                each.update_and_fetch(*[mx.zeros((1, 2, tokens.size, 8))] * 2)
            return mx.broadcast_to(mx.arange(16), (*tokens.shape, 16))

    assert finish(measure_rounding(replace(model, network=Constant(), batches=False), 60.0)) == 0.0


@pytest.mark.parametrize(("dtype", "most"), [(mx.float32, 1e-5), (mx.bfloat16, 5e-2), (mx.float16, 5e-3)])
def test_the_rounding_is_that_of_the_precision(dtype: mx.Dtype, most: float) -> None:
    """On a CPU, 16 bits have none: each row of a product is computed in the same way for any number of rows.

    OpenBLAS computes products of 32 bits with other kernels for few rows, and those of AVX2 round more than AVX-512's.
    """
    model = softened_model(0, 0.3)
    model.network.update(tree_map(lambda weight: weight.astype(dtype), model.network.parameters()))
    rounding = finish(measure_rounding(replace(model, batches=enable_batches(model.network)), 60.0))
    assert 0 <= rounding <= most
    if dtype != mx.float32 and mx.default_device().type == mx.cpu:
        assert rounding == 0


# Texts.


def decode(
    model: LoadedModel,
    sampling: Sampling,
    rounding: float,
    num_tokens: int,
    propose: Callable[[list[int]], list[int]],
    *,
    runs_ahead: bool = False,
) -> tuple[list[int], list[Margin]]:
    """Return the tokens that the target emits behind a prompt, with proposals of any length, and their margins."""
    cache, sampler = SessionCache(model), Sampler(sampling, model.info.vocabulary_size)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    token_ids, margins, position = list(prompt), list[Margin](), 0
    while len(margins) < num_tokens:
        proposal = propose(token_ids)
        steps: Steps[Verification] = verify(
            cache,
            sampler,
            position,
            token_ids[position:],
            proposal,
            chunk=Chunks(64),
            runs_ahead=runs_ahead,
            logit_rounding=rounding,
        )
        verdict = finish(steps)
        assert len(verdict.margins) == verdict.num_accepted + 1
        position = len(token_ids) + verdict.num_accepted
        token_ids += [*proposal[: verdict.num_accepted], verdict.next_token_id]
        margins += verdict.margins
    return token_ids[len(prompt) :][:num_tokens], margins[:num_tokens]


def alone(_: list[int]) -> list[int]:
    return []


def following(text: Sequence[int], k: int) -> Callable[[list[int]], list[int]]:
    """Propose k tokens of a text behind a prompt of eight."""
    return lambda token_ids: list(text[len(token_ids) - 8 :][:k])


@pytest.mark.parametrize("name", examples(["none", "all", "repetition", "top_k", "top_p", "min_p"], 2))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_part_only_at_near_ties(name: str, temperature: float) -> None:
    """For proposals of any length, a text is the target's own up to a token that both report as a near tie."""
    model = rounded_model(0.01)
    rounding = finish(measure_rounding(model, 60.0))
    parted = flagged = total = 0
    for seed in range(6):
        sampling = replace(TRANSFORMS[name], temperature=temperature, seed=seed, logit_bias={seed: 0.5})
        expected, of_expected = decode(model, sampling, rounding, 60, alone)
        flagged += sum(margin.is_near_tie for margin in of_expected)
        total += len(expected)
        for k in (1, 3, 7):
            text, margins = decode(model, sampling, rounding, 60, following(expected, k))
            first = next((i for i, pair in enumerate(zip(text, expected, strict=True)) if pair[0] != pair[1]), None)
            if first is not None:
                parted += 1
                assert margins[first].is_near_tie
                assert of_expected[first].is_near_tie
    assert parted > 0
    assert flagged < total / 2


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_passes_ahead_have_the_margins_of_their_tokens(temperature: float) -> None:
    model, sampling = rounded_model(0.01), replace(TRANSFORMS["all"], temperature=temperature, seed=2)
    expected = decode(model, sampling, 0.01, 40, alone)
    assert any(margin.is_near_tie for margin in expected[1])
    assert decode(model, sampling, 0.01, 40, alone, runs_ahead=True) == expected


def test_by_rejection_there_are_no_margins() -> None:
    cache, sampler = SessionCache(tiny_model()), Sampler(Sampling(acceptance=Acceptance.REJECTION), 16)
    assert finish(verify(cache, sampler, 0, [1, 2], [], chunk=Chunks(8), logit_rounding=9.0)).margins == []


def test_in_float32_on_a_cpu_nothing_is_a_near_tie() -> None:
    model = load(EMBEDDED_TARGET, blas=load_blas(1), is_optimized=True)
    rounding = finish(measure_rounding(model, 4.0))
    if mx.default_device().type == mx.cpu:
        assert 0 < rounding < 1e-5
    smallest = math.inf
    for path in TWENTY_PROMPTS[:4]:
        token_ids = [1 + b for b in path.read_bytes()[:48]]
        cache, sampler = SessionCache(model), Sampler(Sampling(), model.info.vocabulary_size)
        for position in range(0, 48, 8):
            verdict = finish(
                verify(cache, sampler, position, token_ids[position : position + 8], [], chunk=Chunks(64),
                       logit_rounding=rounding)
            )  # fmt: skip
            assert not any(margin.is_near_tie for margin in verdict.margins)
            smallest = min(smallest, *(margin.value for margin in verdict.margins))
    assert 0 < smallest < math.inf


# What is kept.


def test_the_rounding_of_a_target_is_kept_and_a_draft_has_none(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tiny_model()

    def kept(workload: Workload, measured: float) -> float:
        def measure(model: LoadedModel, seconds: float) -> Steps[float]:
            yield Evaluate([])
            return measured

        monkeypatch.setattr(calibration, "measure_rounding", measure)
        return finish(calibrate(model, workload, 1.0)).logit_rounding

    assert kept(VERIFIES, 0.125) == 0.125
    assert kept(VERIFIES, 0.5) == 0.125
    assert kept(PROPOSALS, 0.125) == 0.0

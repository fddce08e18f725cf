"""Every family of mlx-lm with a tiny configuration, through real processes: the tokens are mlx-lm's."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from specd.supervisor import Stack
from specd.v1.generation_pb2 import StopConditions
from specd.v1.sampling_pb2 import SamplingParameters
from specd.worker.model.loader import LoadedModel, load
from specd.worker.sampling.noise import Noise, Purpose
from tests.e2e.completions import complete
from tests.e2e.faults import ENVIRONMENT
from tests.raw_client import RawClient
from tests.worker.families import save_family
from tests.worker.family_configs import NETWORKS

MAX_TOKENS = 24
LENGTHS = (5, 40, 300)
SEED = 1
# The least distance between the best two scores of a token, over the largest logit: rounding then decides nothing.
CLEAR = 1e-3
MOST_TRIES = 12
# These tests do not need a good choice of k.
QUICK = {f"SPECD_{worker}_WORKER_CALIBRATION_SECONDS": "0.05" for worker in ("DRAFT", "TARGET")}


@dataclass(frozen=True)
class Expected:
    """A prompt, and the tokens that mlx-lm generates after it, greedily or with specd's noise for `SEED`."""

    prompt: list[int]
    tokens: dict[float, list[int]]  # by the temperature, 0 for greedy


def temperature_of(model: LoadedModel) -> float:
    """Return a temperature at which noise decides many tokens."""
    logits = np.array(model.network(mx.array([prompt_of(LENGTHS[0], 0)]))[0, -1].astype(mx.float32))
    return float(np.clip(logits.std(), 0.1, 10))


def prompt_of(length: int, attempt: int) -> list[int]:
    return [1 + 37 * (i + attempt) * (length + attempt) % 8000 for i in range(length)]


def expected_of(model: LoadedModel, length: int, temperatures: tuple[float, ...]) -> Expected:
    """Return the first prompt whose tokens all win clearly; after some attempts, the prompt with the clearest ones."""
    best, best_gap = None, -1.0
    for attempt in range(MOST_TRIES):
        prompt = prompt_of(length, attempt)
        decoded = {temperature: decode_with_gap(model, prompt, temperature) for temperature in temperatures}
        gap = min(gap for _, gap in decoded.values())
        if gap > best_gap:
            best, best_gap = Expected(prompt, {each: tokens for each, (tokens, _) in decoded.items()}), gap
        if gap > CLEAR:
            break
    assert best is not None
    return best


def decode_with_gap(model: LoadedModel, prompt: list[int], temperature: float) -> tuple[list[int], float]:
    """Return the tokens of mlx-lm alone, and the least distance between the best two scores, over the largest logit."""
    noise, positions = Noise(SEED, model.info.vocabulary_size), itertools.count(len(prompt))
    gaps: list[float] = []

    def sampler(log_probabilities: mx.array) -> mx.array:
        gumbel = noise.gumbel(Purpose.SAMPLE, next(positions), 1) if temperature else mx.array(0.0)
        scores = log_probabilities + temperature * gumbel
        second, first = np.sort(np.array(scores[0].astype(mx.float32)))[-2:]
        gaps.append(float(first - second) / float(mx.abs(log_probabilities).max()))
        return mx.argmax(scores, axis=-1)

    tokens: list[int] = []
    for token, _ in generate_step(mx.array(prompt), model.network, max_tokens=MAX_TOKENS, sampler=sampler):
        tokens.append(int(token))
        if token in model.info.eos_token_ids:
            break
    return tokens, min(gaps[: len(tokens)])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about fields that mlx-lm wants
@pytest.mark.parametrize("name", sorted(NETWORKS))
async def test_every_k_gives_the_tokens_of_mlx_lm(name: str, tmp_path: Path) -> None:
    target, draft = save_family(tmp_path / "target", name), save_family(tmp_path / "draft", name, noise=0.02)
    model = load(target, blas="")
    temperatures = (0.0, temperature_of(model))
    expected = [expected_of(model, length, temperatures) for length in LENGTHS]
    assert all(len(set(each.tokens[temperatures[1]])) >= 4 for each in expected)

    async with (
        Stack(target=target, draft=draft, environment=ENVIRONMENT | QUICK) as stack,
        RawClient(stack.address) as client,
    ):

        async def check(each: Expected, k: int, temperature: float) -> int:
            """Return how many tokens were accepted."""
            completion = await complete(
                client,
                each.prompt,
                num_draft_tokens=k,
                max_tokens=MAX_TOKENS,
                sampling=SamplingParameters(temperature=temperature, seed=SEED),
                stop=StopConditions(),
            )
            assert completion.token_ids == each.tokens[temperature]
            return completion.statistics.accepted_tokens

        num_accepted = 0
        for k in (0, 1, 4, 8):
            cases = [(each, k, temperature) for each in expected for temperature in temperatures]
            num_accepted += sum(await asyncio.gather(*(check(*case) for case in cases)))
            num_accepted += await check(expected[1], k, temperatures[k == 4])
        assert num_accepted > 0

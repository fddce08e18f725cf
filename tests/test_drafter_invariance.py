"""Sampling on the embedded pair, through real processes: seed and prompt decide what comes out, and nothing else does.

The reference is mlx-lm's own decoding with the target alone, whose random draw is replaced by ours. What `kill -9` of
a worker does to a sampled session is in test_faults.py.
"""

from __future__ import annotations

import asyncio
import itertools

import mlx.core as mx
import pytest

from coordinator.tokenizer import Tokenizer
from specd.client import Client
from specd.v1 import generation_pb2
from specd.v1.sampling_pb2 import SamplingParameters
from specd.worker.model import LoadedModel
from specd.worker.noise import Noise, Purpose
from tests.conftest import TWENTY_PROMPTS
from tests.reference import decode_with_mlx_lm

pytestmark = pytest.mark.processes

MAX_TOKENS = 16
SEED = 1_000_003
TEMPERATURES = (0.7, 1.0)

References = dict[tuple[str, float], list[int]]


@pytest.fixture(scope="module")
def references(target: LoadedModel, tokenizer: Tokenizer) -> References:
    """What the target alone samples for each prompt and temperature."""
    prompts = [path.read_text() for path in TWENTY_PROMPTS]
    return {(p, t): sample_with_mlx_lm(target, tokenizer.encode(p), t) for p in prompts for t in TEMPERATURES}


def sample_with_mlx_lm(target: LoadedModel, prompt_ids: list[int], temperature: float) -> list[int]:
    noise = Noise(SEED, target.info.vocabulary_size)
    # mlx-lm asks for a token before it has handed out the one before.
    positions = itertools.count(len(prompt_ids))

    def sampler(log_probabilities: mx.array) -> mx.array:
        gumbel = noise.gumbel(Purpose.SAMPLE, next(positions), 1)
        return mx.argmax(log_probabilities / mx.array(temperature, mx.float32) + gumbel, axis=-1)

    return decode_with_mlx_lm(target, prompt_ids, MAX_TOKENS, sampler=sampler)


async def sample(
    client: Client, prompt: str, temperature: float, k: int | None
) -> tuple[list[int], generation_pb2.SessionStatistics]:
    sampling = SamplingParameters(temperature=temperature, seed=SEED)
    responses = [r async for r in client.generate(prompt, max_tokens=MAX_TOKENS, num_draft_tokens=k, sampling=sampling)]
    assert {r.seed for r in responses} == {SEED}
    return [token.id for r in responses for token in r.tokens], responses[-1].statistics


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("prompt", [pytest.param(path.read_text(), id=path.stem) for path in TWENTY_PROMPTS])
async def test_every_k_gives_the_same_samples(
    client: Client, references: References, prompt: str, temperature: float
) -> None:
    for k in (*range(9), None):
        token_ids, statistics = await sample(client, prompt, temperature, k)
        assert token_ids == references[prompt, temperature], f"k = {k}"
        assert statistics.draft_fault == ""


async def test_every_draft_gives_the_same_samples(odd_client: Client, references: References) -> None:
    accepted = proposed = 0
    # Every third, of both temperatures: with these drafts each takes some seconds.
    for i, ((prompt, temperature), expected) in enumerate(itertools.islice(references.items(), 0, None, 3)):
        token_ids, statistics = await sample(odd_client, prompt, temperature, 1 + i % 8)
        assert token_ids == expected
        accepted += statistics.accepted_tokens
        proposed += statistics.proposed_tokens
    rates = {"random": (0, 0.1), "always right": (0.97, 1), "always wrong": (0, 0.1)}  # up to end tokens
    low, high = rates[odd_client.draft_kind]  # type: ignore[attr-defined]
    assert low <= accepted / proposed <= high


async def test_going_ahead_gives_the_same_samples(ahead_client: Client, references: References) -> None:
    rounds_ahead = 0
    for (prompt, temperature), expected in references.items():
        token_ids, statistics = await sample(ahead_client, prompt, temperature, None)
        assert token_ids == expected
        rounds_ahead += statistics.rounds_ahead
    assert rounds_ahead > 5  # how many they are depends on k, and that on how fast the machine is


async def test_sessions_at_the_same_time_do_not_change_the_samples(client: Client, references: References) -> None:
    """Sessions of all lengths, temperatures and k at once, greedy ones and some given up on the way among them."""

    async def give_up(prompt: str) -> None:
        async for _ in client.generate(prompt, max_tokens=MAX_TOKENS, sampling=SamplingParameters(temperature=1.5)):
            return

    async def decode_greedily(prompt: str) -> None:
        async for _ in client.generate(prompt, max_tokens=MAX_TOKENS):
            pass

    async with asyncio.TaskGroup() as tasks:
        for prompt, _ in list(references)[::8]:
            tasks.create_task(give_up(prompt))
            tasks.create_task(decode_greedily(prompt))
        running = {key: tasks.create_task(sample(client, *key, i % 9)) for i, key in enumerate(list(references)[::3])}
    for key, task in running.items():
        assert task.result()[0] == references[key]

"""The embedded pair, through real processes: what Generate streams is what mlx-lm decodes, for every k and draft."""

from __future__ import annotations

import asyncio
from itertools import islice

import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer

from coordinator.tokenizer import Tokenizer
from specd.client import Client
from specd.v1 import generation_pb2
from specd.worker.model import LoadedModel
from tests.conftest import TWENTY_PROMPTS
from tests.reference import decode_with_mlx_lm

MAX_TOKENS = 32


@pytest.fixture(scope="module")
def references(target: LoadedModel, tokenizer: Tokenizer) -> dict[str, list[int]]:
    """What mlx-lm's own greedy decoding gives for each prompt, up to and with an end token."""
    prompts = [path.read_text() for path in TWENTY_PROMPTS]
    return {prompt: decode_with_mlx_lm(target, tokenizer.encode(prompt), MAX_TOKENS) for prompt in prompts}


async def generate(client: Client, prompt: str, k: int | None) -> tuple[list[int], generation_pb2.SessionStatistics]:
    responses = [r async for r in client.generate(prompt, max_tokens=MAX_TOKENS, num_draft_tokens=k)]
    return [token.id for r in responses for token in r.tokens], responses[-1].statistics


def test_there_are_prompts_of_every_length(tokenizer: Tokenizer) -> None:
    lengths = [len(tokenizer.encode(path.read_text())) for path in TWENTY_PROMPTS]
    assert len(lengths) >= 20
    assert sum(length < 300 for length in lengths) >= 8
    assert sum(500 <= length < 1500 for length in lengths) >= 2
    assert sum(length >= 1500 for length in lengths) >= 2


@pytest.mark.parametrize("prompt", [pytest.param(path.read_text(), id=path.stem) for path in TWENTY_PROMPTS])
async def test_every_k_gives_the_tokens_of_mlx_lm(
    client: Client, references: dict[str, list[int]], prompt: str
) -> None:
    for k in (*range(9), None):
        token_ids, statistics = await generate(client, prompt, k)
        assert token_ids == references[prompt], f"k = {k}"
        assert statistics.draft_fault == ""
        assert k is None or (statistics.proposed_tokens > 0) == (k > 0)


async def test_every_draft_gives_the_tokens_of_mlx_lm(odd_client: Client, references: dict[str, list[int]]) -> None:
    kind = odd_client.draft_kind  # type: ignore[attr-defined]
    # Every other: with these drafts each takes some seconds.
    for i, (prompt, expected) in enumerate(islice(references.items(), 0, None, 2)):
        token_ids, statistics = await generate(odd_client, prompt, 1 + i % 8)
        assert token_ids == expected
        assert statistics.proposed_tokens > 0
        if kind == "always wrong":
            assert statistics.accepted_tokens == 0
        if kind == "always right" and len(expected) == MAX_TOKENS:
            assert statistics.accepted_tokens == statistics.proposed_tokens


async def test_going_ahead_gives_the_tokens_of_mlx_lm(ahead_client: Client, references: dict[str, list[int]]) -> None:
    rounds_ahead = 0
    for prompt, expected in references.items():
        token_ids, statistics = await generate(ahead_client, prompt, None)
        assert token_ids == expected
        assert statistics.rounds_ahead <= statistics.rounds_gone_ahead <= statistics.rounds
        assert (statistics.ahead_saved_seconds > 0) == (statistics.rounds_ahead > 0)
        rounds_ahead += statistics.rounds_ahead
    assert rounds_ahead > 5  # how many they are depends on k, and that on how fast the machine is


async def test_concurrent_sessions_do_not_mix(client: Client, references: dict[str, list[int]]) -> None:
    """Sessions of all lengths and k at once, some of them given up on the way."""

    async def give_up(prompt: str) -> None:
        async for _ in client.generate(prompt, max_tokens=MAX_TOKENS, num_draft_tokens=3):
            return

    async with asyncio.TaskGroup() as tasks:
        for prompt in list(references)[::3]:
            tasks.create_task(give_up(prompt))
        running = {
            prompt: tasks.create_task(generate(client, prompt, i % 9 if i % 9 else None))
            for i, prompt in enumerate(list(references)[::2])
        }
    for prompt, task in running.items():
        assert task.result()[0] == references[prompt]


async def test_text_is_the_decoding_of_the_tokens(client: Client, target: LoadedModel, prompts: list[str]) -> None:
    tokenizer = HuggingFaceTokenizer.from_str(target.tokenizer_json.decode())
    for prompt in prompts[:16]:
        responses = [r async for r in client.generate(prompt, max_tokens=MAX_TOKENS)]
        token_ids = [token.id for r in responses for token in r.tokens]
        text = "".join(r.text for r in responses)
        assert text == "".join(token.text for r in responses for token in r.tokens)
        assert prompt + text == tokenizer.decode([*tokenizer.encode(prompt).ids, *token_ids])

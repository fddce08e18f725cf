"""Pairs with windows, recurrent states, and both kinds of layers, through real processes: the tokens are mlx-lm's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from specd.cli.supervisor import Stack
from specd.rpc.client import Client
from specd.settings import MAX_NUM_DRAFT_TOKENS
from specd.worker.model.loader import LoadedModel, load
from tests.e2e.completions import complete
from tests.e2e.faults import ENVIRONMENT, kill
from tests.e2e.reference import decode_with_mlx_lm
from tests.worker.models import LARGE_WINDOW, SAVED, save_random_model

MAX_TOKENS = 80  # more than twice the window, and than a state can go back by
PROMPT_LENGTHS = (5, LARGE_WINDOW - 1, LARGE_WINDOW, 70, 300)


@pytest.fixture(scope="module", params=SAVED)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    directory: Path = tmp_path_factory.mktemp("models")
    return save_random_model(directory / "target", request.param), save_random_model(
        directory / "draft", request.param, noise=0.15
    )


@pytest.fixture(scope="module")
async def kind_stack(pair: tuple[str, str]) -> AsyncIterator[Stack]:
    target, draft = pair
    async with Stack(target=target, draft=draft, environment=ENVIRONMENT) as running:
        yield running


@pytest.fixture
async def kind_client(kind_stack: Stack) -> AsyncIterator[Client]:
    async with Client(kind_stack.address) as connected:
        yield connected


@pytest.fixture(scope="module")
def expected(pair: tuple[str, str], token_ids: list[int]) -> dict[int, list[int]]:
    """What mlx-lm makes of prompts, by their lengths, with its own caches."""
    target: LoadedModel = load(pair[0], blas="")
    return {n: decode_with_mlx_lm(target, prompt(token_ids, n), MAX_TOKENS) for n in PROMPT_LENGTHS}


def prompt(token_ids: list[int], length: int) -> list[int]:
    return [1 + token_id % 8000 for token_id in (token_ids * 5)[:length]]


@pytest.mark.parametrize("k", [0, 1, 4, 8, MAX_NUM_DRAFT_TOKENS, None])
async def test_every_k_gives_the_tokens_of_mlx_lm(
    kind_client: Client, token_ids: list[int], expected: dict[int, list[int]], k: int | None
) -> None:
    completions = await asyncio.gather(
        *(
            complete(
                kind_client,
                prompt(token_ids, n),
                max_tokens=MAX_TOKENS,
                **({} if k is None else {"num_draft_tokens": k}),
            )
            for n in PROMPT_LENGTHS
        )
    )
    assert [completion.token_ids for completion in completions] == list(expected.values())
    if k:
        accepted = sum(completion.statistics.accepted_tokens for completion in completions)
        assert 0 < accepted < sum(completion.statistics.proposed_tokens for completion in completions)


async def test_turns_go_on(kind_client: Client, token_ids: list[int], expected: dict[int, list[int]]) -> None:
    first = await complete(kind_client, prompt(token_ids, 70), max_tokens=30, num_draft_tokens=3)
    second = await complete(
        kind_client, session_id=first.last.session_id, prompt=[], max_tokens=MAX_TOKENS - 30, num_draft_tokens=3
    )
    assert first.token_ids + second.token_ids == expected[70]
    assert second.statistics.target_reused_tokens > 90


async def test_a_killed_target_changes_nothing(
    kind_stack: Stack, kind_client: Client, token_ids: list[int], expected: dict[int, list[int]]
) -> None:
    tokens: list[int] = []
    number = 0
    async for response in kind_client.generate(prompt(token_ids, 70), max_tokens=MAX_TOKENS, num_draft_tokens=3):
        tokens += [token.id for token in response.tokens]
        number += 1
        if number == 10:
            kill(kind_stack.target)
    assert tokens == expected[70]
    assert response.statistics.target_replays >= 1

"""Pairs with windows, recurrent states, and both kinds of layers, through real processes: the tokens are mlx-lm's."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from specd.setting_types import MAX_NUM_DRAFT_TOKENS
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.worker.model.loader import LoadedModel, load
from tests.e2e.calls import responses_to
from tests.e2e.completions import complete
from tests.e2e.faults import ENVIRONMENT, kill
from tests.e2e.memory import lasting_growth
from tests.e2e.pace import at_the_pace_of_tests
from tests.e2e.processes import draft_of, read_metric, resident_mib, wait_until_idle
from tests.e2e.reference import decode_with_mlx_lm
from tests.raw_client import RawClient
from tests.thorough import examples
from tests.worker.models import LARGE_WINDOW, SAVED, save_random_model

MAX_TOKENS = 80  # more than twice the window, and than a state can go back by
BUDGET = 4 * 2**20
PROMPT_LENGTHS = (5, LARGE_WINDOW - 1, LARGE_WINDOW, 70, 300)


@pytest.fixture(scope="module", params=examples(SAVED, 2))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    directory: Path = tmp_path_factory.mktemp("models")
    return save_random_model(directory / "target", request.param), save_random_model(
        directory / "draft", request.param, noise=0.15
    )


@pytest.fixture(scope="module")
async def kind_stack(pair: tuple[str, str]) -> AsyncIterator[Stack]:
    target, draft = pair
    async with at_the_pace_of_tests(Stack(target=target, draft=draft, environment=ENVIRONMENT)) as running:
        yield running


@pytest.fixture
async def kind_client(kind_stack: Stack) -> AsyncIterator[RawClient]:
    async with RawClient(kind_stack.address) as connected:
        yield connected


@pytest.fixture(scope="module")
def expected(pair: tuple[str, str], token_ids: list[int]) -> dict[int, list[int]]:
    """mlx-lm's completions of prompts, by their lengths, with its own caches."""
    target: LoadedModel = load(pair[0], blas="")
    return {n: decode_with_mlx_lm(target, prompt(token_ids, n), MAX_TOKENS) for n in PROMPT_LENGTHS}


def prompt(token_ids: list[int], length: int) -> list[int]:
    return [1 + token_id % 8000 for token_id in (token_ids * 5)[:length]]


@pytest.mark.parametrize("length", examples(sorted(PROMPT_LENGTHS, key=lambda n: n != LARGE_WINDOW), 1))
async def test_an_echo_has_the_log_probabilities_of_the_prompt(
    kind_client: RawClient, pair: tuple[str, str], token_ids: list[int], length: int
) -> None:
    """Once when nothing of the prompt is cached, and once when all is."""
    network = load(pair[0], blas="").network
    prompt_ids = prompt(token_ids, length)
    logits = np.array(network(mx.array([prompt_ids]))[0].astype(mx.float32), np.float64)[:-1]
    rows = logits - logits.max(-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
    plain = await complete(kind_client, prompt_ids, max_tokens=4)
    for _ in range(2):
        first, *others = await responses_to(
            kind_client.generate(prompt_ids, max_tokens=4, echo=True, top_log_probabilities=1)
        )
        assert [token.id for each in (first, *others) for token in each.tokens] == plain.token_ids
        assert not any(response.prompt_tokens for response in others)
        assert [token.id for token in first.prompt_tokens] == prompt_ids
        beginning, *scored = first.prompt_tokens
        assert not beginning.HasField("log_probabilities")
        for row, token in zip(rows, scored, strict=True):
            assert token.log_probabilities.model == pytest.approx(row[token.id], abs=1e-2)
            (most_likely,) = token.log_probabilities.top_model
            assert most_likely.log_probability == pytest.approx(row.max(), abs=1e-2)


@pytest.mark.parametrize("k", [0, 4, MAX_NUM_DRAFT_TOKENS, None])  # others: tests/families
async def test_every_k_gives_the_tokens_of_mlx_lm(
    kind_client: RawClient, token_ids: list[int], expected: dict[int, list[int]], k: int | None
) -> None:
    # A round with this number of draft steps takes half a second for five sessions.
    lengths, max_tokens = ((70,), 40) if k == MAX_NUM_DRAFT_TOKENS else (PROMPT_LENGTHS, MAX_TOKENS)
    completions = await asyncio.gather(
        *(
            complete(
                kind_client,
                prompt(token_ids, n),
                max_tokens=max_tokens,
                **({} if k is None else {"num_draft_tokens": k}),
            )
            for n in lengths
        )
    )
    assert [completion.token_ids for completion in completions] == [expected[n][:max_tokens] for n in lengths]
    if k:
        accepted = sum(completion.statistics.accepted_tokens for completion in completions)
        assert 0 < accepted < sum(completion.statistics.proposed_tokens for completion in completions)


async def test_turns_go_on(kind_client: RawClient, token_ids: list[int], expected: dict[int, list[int]]) -> None:
    first = await complete(kind_client, prompt(token_ids, 70), max_tokens=30, num_draft_tokens=3)
    second = await complete(
        kind_client, session_id=first.last.session_id, prompt=[], max_tokens=MAX_TOKENS - 30, num_draft_tokens=3
    )
    assert first.token_ids + second.token_ids == expected[70]
    assert second.statistics.target_reused_tokens > 90


async def test_after_ten_turns_a_session_says_what_it_says_to_all_of_it_at_once(
    pair: tuple[str, str], kind_client: RawClient, token_ids: list[int]
) -> None:
    held: list[int] = []
    session_id = ""
    for turn in range(10):
        added = prompt(token_ids[turn:], 31)
        answer = await complete(kind_client, added, session_id=session_id, max_tokens=12, num_draft_tokens=3)
        # All but what a state cannot go back to the end of.
        assert answer.statistics.target_reused_tokens >= len(held) - 48
        session_id = answer.last.session_id
        before, held = [*held, *added], [*held, *added, *answer.token_ids]
    assert answer.token_ids == decode_with_mlx_lm(load(pair[0], blas=""), before, 12)


@pytest.mark.parametrize("victim", ["target", "draft"])
async def test_a_killed_worker_changes_nothing(
    kind_stack: Stack, kind_client: RawClient, token_ids: list[int], expected: dict[int, list[int]], victim: str
) -> None:
    tokens: list[int] = []
    number = 0
    async for response in kind_client.generate(prompt(token_ids, 70), max_tokens=MAX_TOKENS, num_draft_tokens=3):
        tokens += [token.id for token in response.tokens]
        number += 1
        if number == 10:
            kill(kind_stack.target if victim == "target" else draft_of(kind_stack))
    assert tokens == expected[70]
    if victim == "target":
        assert response.statistics.target_replays >= 1
    else:
        assert response.statistics.rounds_without_draft >= 1


async def test_a_target_killed_between_turns_changes_nothing(
    kind_stack: Stack, kind_client: RawClient, token_ids: list[int], expected: dict[int, list[int]]
) -> None:
    first = await complete(kind_client, prompt(token_ids, 70), max_tokens=30, num_draft_tokens=3)
    kill(kind_stack.target)
    second = await complete(
        kind_client, session_id=first.last.session_id, prompt=[], max_tokens=MAX_TOKENS - 30, num_draft_tokens=3
    )
    assert first.token_ids + second.token_ids == expected[70]
    assert second.statistics.target_reused_tokens == 0


@pytest.mark.thorough
@pytest.mark.parametrize("pair", [*reversed(SAVED)], indirect=True, scope="module")
async def test_a_draft_may_be_of_another_kind(
    pair: tuple[str, str], token_ids: list[int], expected: dict[int, list[int]]
) -> None:
    async with (
        Stack(target=pair[0], draft=EMBEDDED_DRAFT, environment=ENVIRONMENT) as stack,
        RawClient(stack.address) as client,
    ):
        asked = [
            complete(client, prompt(token_ids, n), max_tokens=MAX_TOKENS, num_draft_tokens=4) for n in PROMPT_LENGTHS
        ]
        assert [each.token_ids for each in await asyncio.gather(*asked)] == [expected[n] for n in PROMPT_LENGTHS]


@pytest.mark.thorough  # what sessions hold, by kinds: tests/worker/test_held_memory.py
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
async def test_two_hundred_sessions_on_a_small_budget_leave_memory_flat(tmp_path: Path, token_ids: list[int]) -> None:
    """Of 300 tokens each, with states that the prefix cache keeps: those between the compared readings are 50 MiB and
    more.
    """
    target = save_random_model(tmp_path / "target", "falcon_h1")
    draft = save_random_model(tmp_path / "draft", "falcon_h1", noise=0.15)
    environment = {f"SPECD_{worker}_WORKER_PREFIX_CACHE_BYTES": str(BUDGET) for worker in ("TARGET", "DRAFT")}
    readings = []
    async with (
        Stack(target=target, draft=draft, environment=ENVIRONMENT | environment) as stack,
        RawClient(stack.address) as client,
    ):
        for start in range(0, 192, 16):
            for first in range(start, start + 16, 8):
                prompts = [[1 + number, *prompt(token_ids, 300)] for number in range(first, first + 8)]
                await asyncio.gather(*(complete(client, each, max_tokens=4, num_draft_tokens=2) for each in prompts))
            await wait_until_idle(stack)
            for worker in (stack.target, draft_of(stack)):
                assert 0 < read_metric(worker, "specd_worker_prefix_cache_bytes") <= BUDGET
            readings.append([resident_mib(child.pid) for child in stack.children])
        for worker in (stack.target, draft_of(stack)):
            assert read_metric(worker, "specd_worker_prefix_cache_evictions_total") > 0
    for child, *memory in zip(stack.children, *readings, strict=True):
        assert lasting_growth(memory) < 24, (child.name, memory)


@pytest.mark.parametrize(("bits", "near"), examples([("8", 0.05), ("4", 0.5)], 1))
@pytest.mark.thorough
async def test_with_quantised_caches_a_draft_changes_no_token(token_ids: list[int], bits: str, near: float) -> None:
    """But of two that are nearly as likely: rounding moves a value on the border of two levels by a whole one."""
    own = {"KV_BITS": bits, "KV_GROUP_SIZE": "32"}
    variables = {f"SPECD_{worker}_WORKER_{name}": own[name] for worker in ("TARGET", "DRAFT") for name in own}
    async with (
        Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=ENVIRONMENT | variables) as stack,
        RawClient(stack.address) as client,
    ):
        assert all(f"caches in {bits} bits" in child.facts["precision"] for child in (stack.target, draft_of(stack)))
        for n in (5, 60):
            expected, *others = [
                await complete(client, token_ids[:n], max_tokens=40, num_draft_tokens=k, top_log_probabilities=2)
                for k in (0, 4, 8)
            ]
            for other in others:
                for mine, theirs in zip(expected.tokens, other.tokens, strict=True):
                    if mine.id != theirs.id:
                        first, second = mine.log_probabilities.top_model
                        assert first.log_probability - second.log_probability < near
                        break

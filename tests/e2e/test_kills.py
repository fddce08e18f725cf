"""Workers and clients that are killed while sessions are under way, with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import AsyncIterator, Callable
from random import Random

import pytest

from specd.supervisor import Stack
from tests.e2e.completions import Completion
from tests.e2e.faults import (
    Undisturbed,
    are_free,
    assert_same,
    complete,
    eventually,
    kill,
    scrape,
    sessions_and_tokens,
)
from tests.e2e.processes import PATIENCE_SECONDS, draft_of
from tests.raw_client import RawClient
from tests.thorough import examples

TEMPERATURES = (0.0, 0.7, 1.0)
# With four draft tokens the short prompts take 16 rounds or more: a kill in one of these leaves some to do.
ROUNDS_TO_KILL_IN = (2, 5, 10, 3, 4, 6, 7, 8, 9)

NUM_CLIENTS = 4
# Sooner than by any limit on a client that is silent. `python -m benchmarks.chaos` measures how soon.
RELEASE_SECONDS = 10.0


@pytest.mark.parametrize(
    ("victims", "kill_in_round"),
    [
        *examples(itertools.product(["draft"], ROUNDS_TO_KILL_IN), 1),
        *examples(itertools.product(["target"], ROUNDS_TO_KILL_IN), 2),
        *examples([("draft, target", number) for number in (5, 2, 10)], 1),
    ],
)
async def test_killed_workers_change_nothing_in_the_text(
    harmed_stack: Stack,
    harmed_client: RawClient,
    prompts: list[str],
    undisturbed: Undisturbed,
    victims: str,
    kill_in_round: int,
) -> None:
    random = Random(f"{victims} {kill_in_round}")
    temperature = random.choice(TEMPERATURES)
    # Greedily, some of the short prompts take too few rounds. Sampling goes through all of them, and two longer ones.
    prompt = random.choice(prompts[:18] if temperature else prompts[1:8])
    expected = await undisturbed(prompt, temperature=temperature)
    children = [getattr(harmed_stack, victim) for victim in victims.split(", ")]

    completion = await complete(
        harmed_client,
        prompt,
        temperature=temperature,
        on_round=lambda number: kill(*children) if number == kill_in_round else None,
    )

    assert_same(completion, expected)
    # The draft, killed the time before, was in use again.
    assert sum(response.round.proposed for response in completion.responses[:kill_in_round]) > 0
    if "draft" in victims:
        assert completion.statistics.rounds_without_draft > 0
        assert completion.statistics.draft_fault
    if "target" in victims:
        assert completion.statistics.target_replays >= 1


@pytest.mark.parametrize("attempt", examples(range(4), 1))
async def test_killed_workers_change_nothing_where_k_is_chosen(
    harmed_stack: Stack, harmed_client: RawClient, prompts: list[str], undisturbed: Undisturbed, attempt: int
) -> None:
    prompt, temperature = prompts[2 + attempt], TEMPERATURES[attempt % len(TEMPERATURES)]
    victim = [draft_of(harmed_stack), harmed_stack.target][attempt % 2]
    completion = await complete(
        harmed_client,
        prompt,
        num_draft_tokens=None,
        temperature=temperature,
        on_round=lambda number: kill(victim) if number == 2 + attempt // 2 else None,
    )
    assert_same(completion, await undisturbed(prompt, temperature=temperature))
    assert victim is draft_of(harmed_stack) or completion.statistics.target_replays >= 1


async def test_draft_rejoins_the_session_that_lost_it(
    harmed_stack: Stack, harmed_client: RawClient, prompts: list[str], undisturbed: Undisturbed
) -> None:
    call = harmed_client.generate(prompts[1], max_tokens=1500, num_draft_tokens=3)
    responses = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        async for response in call:
            responses.append(response)
            proposed = [response.round.proposed for response in responses[1:]]
            if len(responses) == 5:
                assert all(proposed)
                kill(draft_of(harmed_stack))
            if 0 in proposed and response.round.accepted > 0:
                break
    call.cancel()  # type: ignore[attr-defined]

    completion = Completion(responses)
    assert responses[-1].round.accepted > 0
    assert completion.token_ids == (await undisturbed(prompts[1], len(completion.token_ids))).token_ids


@pytest.mark.parametrize("prompt_number", examples([20, 21], 1))
async def test_target_killed_in_the_prefill_of_a_long_prompt(
    harmed_stack: Stack, harmed_client: RawClient, prompts: list[str], undisturbed: Undisturbed, prompt_number: int
) -> None:
    prompt = prompts[prompt_number]
    rounds: list[int] = []

    async def is_prefilling() -> bool:
        [(_, cached_tokens)] = await sessions_and_tokens(harmed_stack.target)
        return cached_tokens > 0

    completing = asyncio.create_task(complete(harmed_client, prompt, max_tokens=16, on_round=rounds.append))
    await eventually(is_prefilling, every_seconds=0.005)
    kill(harmed_stack.target)
    assert not rounds
    completion = await completing

    expected = await undisturbed(prompt, 16)  # only now: the target would have kept the prompt in its prefix cache
    assert expected.statistics.prompt_tokens > 1500
    assert_same(completion, expected)
    assert completion.statistics.target_replays >= 1


@pytest.mark.parametrize("attempt", examples(range(3), 1))
async def test_target_killed_under_several_sessions(
    harmed_stack: Stack, harmed_client: RawClient, prompts: list[str], undisturbed: Undisturbed, attempt: int
) -> None:
    random = Random(f"several sessions {attempt}")
    chosen = random.sample(prompts[1:8], 4)
    expected = [await undisturbed(prompt) for prompt in chosen]
    kill_at_message = random.randint(4, 12)  # before one of them can have ended
    messages = 0

    def kill_target_at_message(number: int) -> None:
        nonlocal messages
        messages += 1
        if messages == kill_at_message:
            kill(harmed_stack.target)

    completions = await asyncio.gather(
        *(complete(harmed_client, prompt, on_round=kill_target_at_message) for prompt in chosen)
    )

    for completion, same in zip(completions, expected, strict=True):
        assert_same(completion, same)
        assert completion.statistics.target_replays >= 1


async def test_killed_client_frees_both_workers(
    harmed_stack: Stack, prompts: list[str], record_testsuite_property: Callable[[str, object], None]
) -> None:
    random = Random("client")
    workers = draft_of(harmed_stack), harmed_stack.target
    before = await scrape(harmed_stack.coordinator)
    release_seconds = []
    for _ in range(NUM_CLIENTS):
        async with client_process(harmed_stack.address, random.choice(prompts[1:8])) as process:
            for _ in range(random.randint(2, 20)):
                assert process.stdout is not None
                assert await process.stdout.readline()
            held = await sessions_and_tokens(*workers)
            assert [sessions for sessions, _ in held] == [1, 1]
            assert all(tokens > 0 for _, tokens in held)

            process.kill()
            killed_at = time.perf_counter()
            await eventually(lambda: are_free(*workers), every_seconds=0.01)
            release_seconds.append(time.perf_counter() - killed_at)

    cancelled = "specd_sessions_total{cancelled}"
    assert (await scrape(harmed_stack.coordinator))[cancelled] - before.get(cancelled, 0) == NUM_CLIENTS
    record_testsuite_property("release_seconds", [round(seconds, 4) for seconds in release_seconds])
    assert max(release_seconds) < RELEASE_SECONDS


@contextlib.asynccontextmanager
async def client_process(address: str, prompt: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start `specd generate` on a long completion, a message a line, where the draft proposes in every round."""
    command = [
        sys.executable,
        "-m",
        "specd",
        "generate",
        "--json",
        "--max-tokens",
        "1500",
        "-k",
        "3",
        "--address",
        address,
        prompt,
    ]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()

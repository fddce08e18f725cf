"""Faults in the processes of a stack, and checks that no trace of them stays."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

from specd.child import Child
from specd.supervisor import Stack
from specd.v1.generation_pb2 import StopConditions
from specd.v1.sampling_pb2 import ACCEPTANCE_METHOD_COUPLED, AcceptanceMethod, SamplingParameters
from tests.e2e.completions import Completion
from tests.e2e.processes import PATIENCE_SECONDS, read_metrics
from tests.raw_client import RawClient

SEED = 2**63 + 5
MAX_TOKENS = 64

# A machine that does other things beside the tests can take seconds for a proposal, and that is no fault of the draft.
PATIENT = {"SPECD_COORDINATOR_DRAFT_TIMEOUT_SECONDS": "60"}
# Workers with one thread each get along on two cores, also while one of them restarts.
ENVIRONMENT = PATIENT | {"OPENBLAS_NUM_THREADS": "1"}

Undisturbed = Callable[..., Awaitable[Completion]]


async def complete(
    client: RawClient,
    prompt: str,
    *,
    max_tokens: int = MAX_TOKENS,
    num_draft_tokens: int | None = 4,
    temperature: float = 0.0,
    acceptance: AcceptanceMethod = ACCEPTANCE_METHOD_COUPLED,
    on_round: Callable[[int], None] = lambda number: None,
) -> Completion:
    """Generate to the end; `on_round` gets the number of each message as it arrives, the first is 1."""
    responses = []
    sampling = SamplingParameters(temperature=temperature, seed=SEED, acceptance=acceptance)
    async with asyncio.timeout(PATIENCE_SECONDS):
        async for response in client.generate(
            prompt,
            max_tokens=max_tokens,
            num_draft_tokens=num_draft_tokens,
            sampling=sampling,
            stop=StopConditions(ignore_eos=temperature > 0),  # so that there are rounds to kill in
        ):
            responses.append(response)
            on_round(len(responses))
    return Completion(responses)


def assert_same(completion: Completion, undisturbed: Completion) -> None:
    """Nothing lost, nothing repeated, and a proper end."""
    assert completion.token_ids == undisturbed.token_ids
    assert completion.text == undisturbed.text
    assert completion.text == "".join(token.text for response in completion.responses for token in response.tokens)
    assert completion.finish_reasons == undisturbed.finish_reasons
    assert completion.finish_reasons == [completion.responses[-1].finish_reason]
    assert completion.statistics.generated_tokens == len(completion.token_ids)


def kill(*children: Child) -> None:
    for child in children:
        os.kill(child.pid, signal.SIGKILL)


async def eventually(condition: Callable[[], Awaitable[bool]], *, every_seconds: float = 0.02) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await condition():  # noqa: ASYNC110  (what other processes do raises no event in this one)
            await asyncio.sleep(every_seconds)


async def scrape(child: Child) -> dict[str, float]:
    """Read the metrics of a process, by name or, with labels, as `name{value}`."""
    samples = await asyncio.to_thread(read_metrics, child)
    return {s.name + "".join(f"{{{value}}}" for value in s.labels.values()): s.value for s in samples}


async def sessions_and_tokens(*workers: Child) -> list[tuple[float, float]]:
    """Return the number of sessions and of cached tokens of each worker."""
    scraped = await asyncio.gather(*map(scrape, workers))
    return [(metrics["specd_worker_active_sessions"], metrics["specd_worker_cached_tokens"]) for metrics in scraped]


async def are_free(*workers: Child) -> bool:
    return await sessions_and_tokens(*workers) == [(0, 0)] * len(workers)


async def is_whole(stack: Stack) -> bool:
    """Return whether all processes run and the coordinator has both workers."""
    try:
        coordinator, *_ = await asyncio.gather(*map(scrape, (stack.coordinator, *stack.workers)))
    except OSError:  # one is not back yet
        return False
    return coordinator["specd_draft_available"] == coordinator["specd_target_available"] == 1


def undisturbed_by(client: RawClient) -> Undisturbed:
    """Return a function that completes a prompt with the target alone, and remembers what came of it."""
    completions: dict[tuple[str, int, float], Completion] = {}

    async def complete_undisturbed(prompt: str, max_tokens: int = MAX_TOKENS, temperature: float = 0.0) -> Completion:
        key = prompt, max_tokens, temperature
        if key not in completions:
            completions[key] = await complete(
                client, prompt, max_tokens=max_tokens, num_draft_tokens=0, temperature=temperature
            )
            assert completions[key].statistics.target_replays == 0
        return completions[key]

    return complete_undisturbed

"""A client that comes to one with many sessions: these yield, and no text changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from specd.rpc.credentials import ClientCredentials
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.v1.generation_pb2 import StopConditions
from specd.v1.sampling_pb2 import SamplingParameters
from tests.e2e.guarded import make_tokens
from tests.e2e.processes import eventually, read_metric, wait_until_idle
from tests.raw_client import RawClient

PROMPT = "class Stack:\n    def"


async def generate(client: RawClient, seed: int, max_tokens: int = 160) -> list[int]:
    """Return the tokens of one session; seed 0 is greedy."""
    sampling = SamplingParameters(temperature=1.0 if seed else 0.0, seed=seed)
    stop = StopConditions(ignore_eos=True)
    return [
        token.id
        async for response in client.generate(PROMPT, sampling=sampling, max_tokens=max_tokens, stop=stop)
        for token in response.tokens
    ]


@pytest.mark.thorough
async def test_sessions_of_who_has_many_give_way_and_keep_their_texts(tmp_path: Path) -> None:
    few, many = make_tokens(tmp_path / "tokens", "few", "many")
    environment = {"SPECD_COORDINATOR_TOKENS": str(tmp_path / "tokens"), "SPECD_COORDINATOR_MAX_SESSIONS": "2"}
    async with (
        Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=environment) as stack,
        RawClient(stack.address, ClientCredentials(token=few)) as modest,
        RawClient(stack.address, ClientCredentials(token=many)) as greedy,
    ):
        expected = [await generate(modest, seed) for seed in range(5)]
        running = [asyncio.create_task(generate(greedy, seed)) for seed in range(4)]
        await eventually(lambda: read_metric(stack.coordinator, "specd_queued_requests") == 2)
        # It comes again and again, so that sessions yield and continue in many of their rounds.
        done, num_paused = asyncio.gather(*running), 0.0
        while not done.done():
            one = asyncio.create_task(generate(modest, 4))
            while not one.done():
                await asyncio.sleep(0.02)
                num_paused = max(num_paused, read_metric(stack.coordinator, "specd_paused_sessions"))
            assert await one == expected[4]
        assert await done == expected[:4]
        assert num_paused >= 1, "two ran, and one of them yielded"
        await wait_until_idle(stack)
        assert read_metric(stack.coordinator, "specd_paused_sessions") == 0

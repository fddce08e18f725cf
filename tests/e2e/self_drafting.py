"""Requests to a target worker that drafts itself, and what holds for all of its sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from specd.supervisor import Stack
from specd.v1.generation_pb2 import StopConditions
from specd.v1.sampling_pb2 import SamplingParameters
from tests.e2e.completions import Completion, complete
from tests.e2e.faults import are_free, assert_same, eventually, is_whole, kill
from tests.e2e.faults import complete as complete_undisturbed
from tests.raw_client import RawClient

FIELDS: dict[str, Any] = {"max_tokens": 48, "stop": StopConditions(ignore_eos=True)}


async def ask(client: RawClient, prompt: str, k: int | None, **sampling: Any) -> Completion:
    given = {} if k is None else {"num_draft_tokens": k}
    return await complete(client, prompt, sampling=SamplingParameters(seed=5, **sampling), **FIELDS, **given)


async def assert_sessions_go_together(client: RawClient, prompts: Sequence[str], temperature: float) -> None:
    """Six sessions at once have the tokens of each alone, with any k."""
    alone = [await ask(client, prompt, 0, temperature=temperature) for prompt in prompts]
    for ks in ([4] * 6, [None] * 6, [0, 1, None, 3, 8, 2]):
        together = await asyncio.gather(
            *(ask(client, prompt, k, temperature=temperature) for prompt, k in zip(prompts, ks, strict=True))
        )
        assert [each.token_ids for each in together] == [each.token_ids for each in alone]


async def assert_survives_a_kill(
    stack: Stack, client: RawClient, prompt: str, *, kill_in_round: int, temperature: float, **fields: Any
) -> None:
    """A target that is killed in a round changes no token, and drafts again."""
    await eventually(lambda: is_whole(stack))
    expected = await complete_undisturbed(client, prompt, num_draft_tokens=0, temperature=temperature)
    completion = await complete_undisturbed(
        client,
        prompt,
        temperature=temperature,
        on_round=lambda number: kill(stack.target) if number == kill_in_round else None,
        **fields,
    )
    assert_same(completion, expected)
    assert completion.statistics.target_replays >= 1
    assert sum(response.round.proposed for response in completion.responses[kill_in_round + 2 :]) > 0
    await eventually(lambda: are_free(stack.target))

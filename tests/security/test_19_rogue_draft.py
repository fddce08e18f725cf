"""Check 19: a draft worker that lies, stalls, floods or answers for another life costs proposals, and nothing else."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specd.child import Child
from specd.supervisor import Stack
from specd.v1.draft_pb2 import ProposeResponse
from specd.v1.model_pb2 import StepCost
from specd.v1.sampling_pb2 import ACCEPTANCE_METHOD_REJECTION, SamplingParameters, TokenDistribution
from tests.e2e.completions import Completion, complete
from tests.e2e.processes import RunningSpecd, draft_of, eventually, read_metrics
from tests.raw_client import RawClient
from tests.security.rogue import Lie, Rogue, coordinator_of, truth

PROMPT = "class Stack:\n    def"
MAX_TOKENS = 24


@dataclass
class Victim:
    """A coordinator whose draft lies."""

    rogue: Rogue
    client: RawClient
    running: RunningSpecd
    process: Child
    target_only: Completion

    async def complete(self, **fields: Any) -> Completion:
        return await complete(self.client, PROMPT, max_tokens=MAX_TOKENS, **fields)

    def assert_metrics_whole(self) -> None:
        samples = read_metrics(self.process)
        assert all(sample.value >= 0 and math.isfinite(sample.value) for sample in samples if "le" not in sample.labels)
        faults = {s.labels["reason"] for s in samples if s.name == "specd_rounds_without_draft_total"}
        assert len(faults) < 12
        assert all(fault.startswith(("DRAFT_", "CACHE_")) for fault in faults)


@pytest.fixture(scope="module")
async def victim(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Victim]:
    address = f"unix:{tmp_path_factory.mktemp('rogue') / 'draft'}"
    async with (
        Rogue("draft", draft_of(stack), address) as rogue,
        coordinator_of(stack.target.facts["address"], address) as (running, client, metrics),
    ):
        process = cast(Child, SimpleNamespace(facts={"metrics_address": metrics}))
        target_only = await complete(client, PROMPT, max_tokens=MAX_TOKENS, num_draft_tokens=0)
        yield Victim(rogue, client, running, process, target_only)


def changed(change: Callable[[ProposeResponse], object]) -> Lie:
    async def lie(answer: ProposeResponse) -> AsyncIterator[ProposeResponse]:
        change(answer)
        yield answer

    return lie


async def stall(answer: ProposeResponse) -> AsyncIterator[ProposeResponse]:
    await asyncio.sleep(3600)
    yield answer


async def answer_twice(answer: ProposeResponse) -> AsyncIterator[ProposeResponse]:
    yield answer
    yield answer


async def never_end(answer: ProposeResponse) -> AsyncIterator[ProposeResponse]:
    while True:
        yield answer


async def answer_old_rounds(answer: ProposeResponse) -> AsyncIterator[ProposeResponse]:
    answer.round -= 1
    yield answer


def reverse(answer: ProposeResponse) -> None:
    answer.token_ids[:] = [*answer.token_ids][::-1]


LIES: dict[str, Lie] = {
    "ids beyond the vocabulary": changed(lambda a: a.token_ids.extend(a.token_ids and [a.token_ids.pop() + 2**31])),
    "other ids": changed(reverse),
    "1,000 tokens too many": changed(lambda a: a.token_ids.extend([5] * 1000)),
    "no tokens": changed(lambda a: a.ClearField("token_ids")),
    "10 MB of tokens": changed(lambda a: a.token_ids.extend([5] * 10_000_000)),
    "a message beyond the limit": changed(
        lambda a: a.distributions.append(TokenDistribution(probabilities=bytes(70 * 2**20)))
    ),
    "a longer cache": changed(lambda a: setattr(a, "cached_len", a.cached_len + 1)),
    "a cache of 2^32": changed(lambda a: setattr(a, "cached_len", 2**32 - 1)),
    "an empty cache": changed(lambda a: setattr(a, "cached_len", 0)),
    "2^32 reused": changed(lambda a: setattr(a, "reused_len", 2**32 - 1)),
    "times of NaN": changed(lambda a: setattr(a.time, "compute_seconds", math.nan)),
    "times before the start": changed(lambda a: setattr(a.time, "queue_seconds", -1e300)),
    "endless times": changed(lambda a: setattr(a.time, "compute_seconds", math.inf)),
    "steps of no session": changed(lambda a: a.ClearField("time")),
    "old rounds": answer_old_rounds,
    "future rounds": changed(lambda a: setattr(a, "round", 2**64 - 1)),
    "an answer twice": answer_twice,
    "no answer": stall,
    "answers without end": never_end,
}


@pytest.mark.parametrize("lie", LIES)
async def test_the_text_is_the_targets(victim: Victim, lie: str) -> None:
    victim.rogue.lie = LIES[lie]
    completions = await asyncio.gather(victim.complete(num_draft_tokens=4), victim.complete())
    victim.rogue.lie = truth
    for completion in completions:
        assert completion.text == victim.target_only.text
        assert completion.token_ids == victim.target_only.token_ids
    victim.assert_metrics_whole()


@pytest.mark.parametrize("changes", ["NaN", "a sum of 2", "another token's", "none", "a broken one"])
async def test_distributions_that_are_none_do_not_end_the_session(victim: Victim, changes: str) -> None:
    def change(answer: ProposeResponse) -> None:
        values = {"NaN": [math.nan] * 8192, "a sum of 2": [2 / 8192] * 8192}
        for i, token_id in enumerate(answer.token_ids):
            if changes in values:
                import numpy as np

                answer.distributions[i].CopyFrom(
                    TokenDistribution(probabilities=np.array(values[changes], "<f4").tobytes())
                )
            elif changes == "another token's":
                other = (token_id + 1) % 8192
                answer.distributions[i].CopyFrom(
                    TokenDistribution(token_ids=other.to_bytes(4, "little"), probabilities=b"\0\0\x80?")
                )
            elif changes == "a broken one":
                answer.distributions[i].probabilities = b"\0\0\0"
        if changes == "none":
            answer.ClearField("distributions")

    sampling = SamplingParameters(temperature=0.8, seed=7, acceptance=ACCEPTANCE_METHOD_REJECTION)
    expected = await victim.complete(num_draft_tokens=0, sampling=sampling)
    victim.rogue.lie = changed(change)
    completion = await victim.complete(sampling=sampling, num_draft_tokens=4)
    victim.rogue.lie = truth
    assert completion.token_ids == expected.token_ids
    assert completion.statistics.draft_fault == "DRAFT_BROKEN"


async def test_an_answer_of_an_older_life_gives_no_proposal(victim: Victim) -> None:
    await victim.rogue.sessions_ended()
    victim.rogue.incarnation = "an earlier life"
    completion = await victim.complete(num_draft_tokens=4)
    victim.rogue.incarnation = ""
    assert completion.token_ids == victim.target_only.token_ids
    assert completion.statistics.proposed_tokens == 0
    assert completion.statistics.draft_fault == "DRAFT_REPLACED"


@pytest.mark.parametrize(
    "describe",
    [
        lambda d: d.step_costs.append(StepCost(sessions=1, width=1, seconds=math.nan)),
        lambda d: setattr(d.model, "vocabulary_size", 2**32 - 1),
    ],
    ids=["costs of NaN", "a vocabulary of 2^32"],
)
async def test_a_description_that_cannot_be_leaves_sessions_without_a_draft(
    victim: Victim, describe: Callable[[Any], object]
) -> None:
    rogue = victim.rogue
    rogue.describe = describe
    await rogue.set_serving(False)
    await _fault(victim, "DRAFT_UNAVAILABLE")
    num_refused = sum("cannot use a worker" in line for line in victim.running.lines)
    await rogue.set_serving(True)
    await eventually(lambda: sum("cannot use a worker" in line for line in victim.running.lines) > num_refused)
    completion = await victim.complete(num_draft_tokens=4)
    assert completion.token_ids == victim.target_only.token_ids
    assert completion.statistics.draft_fault == "DRAFT_UNAVAILABLE"
    rogue.describe = lambda _: None


async def test_a_draft_that_is_honest_again_is_used_again(victim: Victim) -> None:
    await _fault(victim, "")
    completion = await victim.complete(num_draft_tokens=4)
    assert completion.token_ids == victim.target_only.token_ids
    assert completion.statistics.accepted_tokens > 0
    victim.assert_metrics_whole()


async def _fault(victim: Victim, fault: str) -> None:
    async with asyncio.timeout(60):
        while (await victim.client.model_info()).draft_fault != fault:  # noqa: ASYNC110 - in another process
            await asyncio.sleep(0.1)

"""Models whose logits are not finite: the session that meets them fails, or does without its draft, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specd.errors import DOMAIN, error_info
from specd.rpc.channel import open_channel
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.v1.generation_pb2 import StopConditions
from specd.v1.sampling_pb2 import (
    SamplingParameters,
)
from tests.e2e.calls import END_TOKEN, VOCABULARY_SIZE, error_of, responses_to
from tests.e2e.processes import wait_until_idle
from tests.raw_client import RawClient
from tests.worker.models import save_poisoned

DRAFT_NAN, DRAFT_INF, TARGET_NAN, TARGET_INF = range(VOCABULARY_SIZE - 4, VOCABULARY_SIZE)


@pytest.fixture(scope="module")
async def poisoned_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """The embedded pair, but the draft fails after two of the tokens and the target after two others."""
    directory = tmp_path_factory.mktemp("poisoned")
    target = save_poisoned(EMBEDDED_TARGET, directory / "target", nan=TARGET_NAN, inf=TARGET_INF)
    draft = save_poisoned(EMBEDDED_DRAFT, directory / "draft", nan=DRAFT_NAN, inf=DRAFT_INF)
    async with Stack(target=target, draft=draft) as running:
        yield running


@pytest.fixture
async def poisoned(poisoned_stack: Stack) -> AsyncIterator[RawClient]:
    """A client of it; after the test the processes are still the same, hold no session, and serve."""
    pids = [child.pid for child in poisoned_stack.children]
    async with RawClient(poisoned_stack.address) as connected:
        yield connected
    await wait_until_idle(poisoned_stack)
    for child in poisoned_stack.children:
        async with open_channel(child.facts["address"]) as channel:
            response = await cast(Any, health_pb2_grpc.HealthStub(channel)).Check(health_pb2.HealthCheckRequest())
            assert response.status == health_pb2.HealthCheckResponse.SERVING
    assert [child.pid for child in poisoned_stack.children] == pids


async def tokens_of(call: AsyncIterator[Any]) -> list[int]:
    return [token.id for response in await responses_to(call) for token in response.tokens]


@pytest.mark.parametrize("token_id", [DRAFT_NAN, DRAFT_INF], ids=["NaN", "inf"])
async def test_a_draft_without_finite_logits_is_done_without(
    poisoned: RawClient, client: RawClient, token_ids: list[int], token_id: int
) -> None:
    prompt = [*token_ids[:20], token_id]
    responses = await responses_to(poisoned.generate(prompt, max_tokens=8, num_draft_tokens=4))

    statistics = responses[-1].statistics
    assert statistics.draft_fault == "NON_FINITE_LOGITS"
    assert statistics.rounds_without_draft > 0
    assert statistics.proposed_tokens == 0
    alone = await tokens_of(client.generate(prompt, max_tokens=8, num_draft_tokens=0))
    assert [token.id for response in responses for token in response.tokens] == alone


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
@pytest.mark.parametrize("token_id", [TARGET_NAN, TARGET_INF], ids=["NaN", "inf"])
async def test_a_target_without_finite_logits_fails_the_session(
    poisoned: RawClient, client: RawClient, token_ids: list[int], token_id: int, num_draft_tokens: int
) -> None:
    prefix = [100 * (token_id % 7 + 1) + num_draft_tokens, *token_ids]  # which no other test has
    call = poisoned.generate([*prefix, token_id], max_tokens=8, num_draft_tokens=num_draft_tokens)
    error = await error_of(call)

    assert error.code() is grpc.StatusCode.INTERNAL
    assert (error_info(error).domain, error_info(error).reason) == (DOMAIN, "NON_FINITE_LOGITS")

    # Nothing of it is left: not in the cache, where the NaN spread to the tokens before it, and not in the session.
    responses = await responses_to(poisoned.generate(prefix, max_tokens=8, num_draft_tokens=4))
    assert responses[-1].statistics.target_reused_tokens == 0
    assert responses[-1].statistics.draft_fault == ""
    sound = await tokens_of(client.generate(prefix, max_tokens=8, num_draft_tokens=0))
    assert [token.id for response in responses for token in response.tokens] == sound


async def test_a_session_that_fails_does_not_disturb_others(
    poisoned: RawClient, client: RawClient, token_ids: list[int]
) -> None:
    expected = await tokens_of(client.generate(token_ids[:9], max_tokens=30, num_draft_tokens=0))
    others = [asyncio.ensure_future(tokens_of(poisoned.generate(token_ids[:9], max_tokens=30))) for _ in range(2)]
    while not all(other.done() for other in others):
        error = await error_of(poisoned.generate([*token_ids[:9], TARGET_NAN, *token_ids[:9]], max_tokens=8))
        assert error_info(error).reason == "NON_FINITE_LOGITS"
        slowed = await responses_to(poisoned.generate([*token_ids[:9], DRAFT_NAN], max_tokens=4, num_draft_tokens=4))
        assert slowed[-1].statistics.draft_fault == "NON_FINITE_LOGITS"
    assert [other.result() for other in others] == [expected] * 2


async def test_a_target_that_fails_later_fails_the_session_then(poisoned: RawClient, token_ids: list[int]) -> None:
    """With a bias, the fourth token is the one after which the target fails."""
    sampling = SamplingParameters(logit_bias={TARGET_NAN: 100})
    stop = StopConditions(min_tokens=3, token_ids=[TARGET_NAN])
    ended = await tokens_of(poisoned.generate(token_ids[:9], sampling=sampling, stop=stop, num_draft_tokens=0))
    assert ended[3:] == [TARGET_NAN]
    for num_draft_tokens in (0, 4):
        fields: dict[str, Any] = {"sampling": sampling, "num_draft_tokens": num_draft_tokens, "max_tokens": 8}
        error = await error_of(poisoned.generate(token_ids[:9], **fields))
        assert error_info(error).reason == "NON_FINITE_LOGITS"


async def test_a_prefill_that_is_not_finite_is_not_kept(poisoned: RawClient, token_ids: list[int]) -> None:
    """A prefill computes no logits. The session ends before the draft proposes, so no error is seen."""
    prefix = [11, *token_ids[:30]]
    at_once = SamplingParameters(logit_bias={END_TOKEN: 100})
    prompt = [*prefix, DRAFT_NAN, *token_ids]
    responses = await responses_to(poisoned.generate(prompt, sampling=at_once, num_draft_tokens=4, max_tokens=8))
    assert responses[-1].statistics.generated_tokens == 1

    responses = await responses_to(poisoned.generate(prefix, num_draft_tokens=4, max_tokens=8))
    assert responses[-1].statistics.draft_fault == ""

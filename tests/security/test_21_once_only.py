"""Check 21: a request that is sent twice, or again after its stream broke, adds its tokens to the session once."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from specd.v1.session_pb2 import GetSessionRequest
from specd.v1.session_pb2_grpc import SessionServiceStub
from tests.e2e.completions import Completion, complete
from tests.raw_client import RawClient
from tests.security.standing import Standing


async def tokens_of_session(client: RawClient, session_id: str) -> list[int]:
    """Return all tokens that a session holds."""
    response = await SessionServiceStub(client.channel).GetSession(GetSessionRequest(session_id=session_id))
    return list(response.token_ids)


async def try_to_complete(client: RawClient, session_id: str) -> Completion | grpc.StatusCode:
    """Continue a session, or return the status of the refusal."""
    try:
        return await complete(client, "\n", session_id=session_id, max_tokens=24)
    except grpc.aio.AioRpcError as error:
        return error.code()


async def test_of_two_equal_turns_at_once_one_is_refused(standing: Standing) -> None:
    client = standing.client
    first = await complete(client, max_tokens=8)
    session_id = first.last.session_id
    before = await tokens_of_session(client, session_id)
    outcomes = await asyncio.gather(*[try_to_complete(client, session_id) for _ in range(4)])
    (turn,) = [outcome for outcome in outcomes if isinstance(outcome, Completion)]
    assert [outcome for outcome in outcomes if outcome is not turn] == [grpc.StatusCode.ABORTED] * 3
    after = await tokens_of_session(client, session_id)
    assert after[: len(before)] == before
    assert after[-len(turn.token_ids) :] == turn.token_ids
    assert len(after) == turn.statistics.prompt_tokens + len(turn.token_ids)


@pytest.mark.parametrize("num_messages", [0, 1, 3])
async def test_a_turn_that_broke_off_and_is_sent_again_counts_once(standing: Standing, num_messages: int) -> None:
    client = standing.client
    session_id = (await complete(client, max_tokens=8)).last.session_id
    before = await tokens_of_session(client, session_id)
    async with RawClient(standing.stack.address) as other:
        stream = other.generate("\n", session_id=session_id, max_tokens=200).__aiter__()
        for _ in range(num_messages):
            await anext(stream)
    # Its connection is lost, and the session is as it was as soon as that is noticed.
    async with asyncio.timeout(30):
        while (again := await try_to_complete(client, session_id)) is grpc.StatusCode.ABORTED:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert isinstance(again, Completion)
    after = await tokens_of_session(client, session_id)
    assert after[: len(before)] == before
    assert len(after) == again.statistics.prompt_tokens + len(again.token_ids)
    assert after[-len(again.token_ids) :] == again.token_ids

"""Sessions that are kept, through real processes: which there are, when they end, and what outlives a worker."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from specd.rpc.channel import open_channel
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.v1.draft_pb2 import ProposeRequest
from specd.v1.draft_pb2_grpc import DraftServiceStub
from specd.v1.sampling_pb2 import SamplingParameters
from specd.v1.session_pb2 import DeleteSessionRequest, GetSessionRequest, ListSessionsRequest
from specd.v1.session_pb2_grpc import SessionServiceStub
from tests.e2e.completions import complete
from tests.e2e.kept_sessions import GONE, IGNORE_EOS, LONG, get_session, refusal
from tests.e2e.memory import lasting_growth
from tests.e2e.processes import PATIENCE_SECONDS, read_metric, resident_mib, start_specd, wait_until_idle
from tests.raw_client import RawClient
from tests.thorough import examples

PREFIX_CACHE_BYTES = 16 * 2**20


@pytest.fixture(scope="module")
async def own_stack() -> AsyncIterator[Stack]:
    """A stack of this module's own, whose prefix caches are small."""
    small = str(PREFIX_CACHE_BYTES)
    environment = {f"SPECD_{worker}_WORKER_PREFIX_CACHE_BYTES": small for worker in ("DRAFT", "TARGET")}
    async with Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=environment) as running:
        yield running


@pytest.fixture(scope="module")
async def own_client(own_stack: Stack) -> AsyncIterator[RawClient]:
    async with RawClient(own_stack.address) as connected:
        yield connected


async def test_sessions_are_listed_shown_and_deleted(client: RawClient, sessions: SessionServiceStub) -> None:
    made = [(await complete(client, max_tokens=2)).last.session_id for _ in range(3)]
    listed = (await sessions.ListSessions(ListSessionsRequest())).sessions
    assert [session.session_id for session in listed[:3]] == made[::-1]
    await complete(client, "", max_tokens=2, session_id=made[0])
    listed = (await sessions.ListSessions(ListSessionsRequest())).sessions
    assert [(session.session_id, session.num_turns) for session in listed[:3]] == [
        (made[0], 2),
        (made[2], 1),
        (made[1], 1),
    ]
    assert listed[0].created_at.ToNanoseconds() < listed[2].created_at.ToNanoseconds()
    assert listed[0].last_used_at.ToNanoseconds() < listed[0].expires_at.ToNanoseconds()
    shown = (await get_session(sessions, made[0])).session
    # It is reckoned from two clocks each time, between which the process may have to wait.
    assert abs(shown.expires_at.ToNanoseconds() - listed[0].expires_at.ToNanoseconds()) < 1e9
    shown.expires_at.CopyFrom(listed[0].expires_at)
    assert shown == listed[0]

    await sessions.DeleteSession(DeleteSessionRequest(session_id=made[0]))
    listed = (await sessions.ListSessions(ListSessionsRequest())).sessions
    assert made[0] not in [session.session_id for session in listed]
    assert await refusal(client.generate("x", session_id=made[0])) == GONE
    assert await refusal(sessions.GetSession(GetSessionRequest(session_id=made[0]))) == GONE
    assert await refusal(sessions.DeleteSession(DeleteSessionRequest(session_id=made[0]))) == GONE


async def test_a_session_whose_first_turn_does_not_finish_is_forgotten(
    stack: Stack, client: RawClient, sessions: SessionServiceStub
) -> None:
    async def kept() -> set[str]:
        return {session.session_id for session in (await sessions.ListSessions(ListSessionsRequest())).sessions}

    call = client.generate("def", **LONG)
    session_id = (await anext(aiter(call))).session_id
    assert session_id in await kept()
    call.cancel()  # type: ignore[attr-defined]
    async with asyncio.timeout(PATIENCE_SECONDS):
        while session_id in await kept():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert await refusal(client.generate("x", session_id=session_id)) == GONE
    # Other sessions may end during the test, since all tests share the stack; none may begin.
    before = await kept()
    with pytest.raises(grpc.aio.AioRpcError):
        await complete(client, "x", num_draft_tokens=33)
    assert await kept() <= before


@asynccontextmanager
async def another_coordinator(stack: Stack, directory: Path, **settings: str) -> AsyncIterator[RawClient]:
    """Run a coordinator with other settings for the workers of a stack, and yield its client."""
    assert stack.draft is not None
    address = f"unix:{directory / 'coordinator'}"
    options = ["--target", stack.target.facts["address"], "--draft", stack.draft.facts["address"]]
    variables = {f"SPECD_COORDINATOR_{name.upper()}": value for name, value in settings.items()}
    async with start_specd(
        "coordinator", *options, "--listen", address, "--metrics-listen", "", **variables
    ) as coordinator:
        await coordinator.next_event("ready")
        async with RawClient(address) as connected:
            yield connected


async def test_sessions_expire(stack: Stack, tmp_path: Path) -> None:
    async with another_coordinator(stack, tmp_path, session_idle_seconds="1") as client:
        turn = await complete(client, max_tokens=2)
        kept = SessionServiceStub(client.channel)
        while (await kept.ListSessions(ListSessionsRequest())).sessions:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        assert await refusal(client.generate("", session_id=turn.last.session_id)) == GONE
        # A running session does not expire, for any time.
        call = client.generate("def", **LONG)
        session_id = (await anext(aiter(call))).session_id
        await asyncio.sleep(1.2)
        responses = [response async for response in call]
        assert responses[-1].statistics.generated_tokens == LONG["max_tokens"]
        assert responses[-1].session_id == session_id


async def test_the_least_recently_used_sessions_go_when_there_are_too_many_tokens(stack: Stack, tmp_path: Path) -> None:
    async with another_coordinator(stack, tmp_path, session_budget_tokens="60") as client:
        kept = SessionServiceStub(client.channel)

        async def turn(num_tokens: int, session_id: str = "") -> str:
            prompt = [5] * (num_tokens - 2)
            return (await complete(client, prompt, max_tokens=2, session_id=session_id)).last.session_id

        async def listed() -> list[str]:
            return [session.session_id for session in (await kept.ListSessions(ListSessionsRequest())).sessions]

        first, second, third = [await turn(20) for _ in range(3)]
        assert await listed() == [third, second, first]
        fourth = await turn(10)
        assert await listed() == [fourth, third, second]
        await turn(10, second)
        assert await listed() == [second, fourth, third]
        await turn(2, third)  # which is no longer the one to go
        assert await listed() == [third, second]
        too_large = await turn(61)
        assert await listed() == [third, second]
        assert await refusal(client.generate("", session_id=too_large)) == GONE
        assert await refusal(client.generate("", session_id=first)) == GONE


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.thorough
async def test_sessions_that_end_take_no_more_memory_than_they_may(own_stack: Stack, own_client: RawClient) -> None:
    assert own_stack.draft is not None

    async def run(draft: DraftServiceStub, number: int) -> None:
        """A session of a token, and, because it would not take the draft, one there."""
        prompt = [5 + number % 4000, number, number // 2]
        await complete(own_client, prompt, max_tokens=1)
        proposals = draft.Propose(iter([ProposeRequest(token_ids=prompt, num_draft_tokens=2)]))
        assert [len(proposal.token_ids) async for proposal in proposals] == [2]

    readings = []
    for part in range(12):
        async with open_channel(own_stack.draft.facts["address"]) as channel:
            draft = DraftServiceStub(channel)
            for start in range(45 * part, 45 * (part + 1), 5):
                await asyncio.gather(*(run(draft, number) for number in range(start, start + 5)))
        await wait_until_idle(own_stack)
        for worker in (own_stack.target, own_stack.draft):
            assert 0 < read_metric(worker, "specd_worker_prefix_cache_bytes") <= PREFIX_CACHE_BYTES
            assert read_metric(worker, "specd_worker_prefix_cache_evictions_total") > 40 * (part + 1) - 50
        readings.append([resident_mib(child.pid) for child in own_stack.children])
    for child, *memory in zip(own_stack.children, *readings, strict=True):
        assert lasting_growth(memory) < 8, (child.name, memory)


@pytest.mark.parametrize("num_draft_tokens", examples([4, 0], 1))
async def test_a_session_survives_the_target(own_stack: Stack, own_client: RawClient, num_draft_tokens: int) -> None:
    fields: dict[str, Any] = {"max_tokens": 10, "stop": IGNORE_EOS}
    sampling = SamplingParameters(temperature=0.8, top_k=100, seed=3)
    whole = await complete(own_client, sampling=sampling, num_draft_tokens=0, **{**fields, "max_tokens": 20})
    first = await complete(own_client, sampling=sampling, num_draft_tokens=num_draft_tokens, **fields)

    os.kill(own_stack.target.pid, signal.SIGKILL)
    second = await complete(
        own_client,
        "",
        session_id=first.last.session_id,
        sampling=sampling,
        num_draft_tokens=num_draft_tokens,
        **fields,
    )
    assert [*first.token_ids, *second.token_ids] == whole.token_ids
    assert second.statistics.target_reused_tokens == 0

"""Limits of clients on a real Redis server: N coordinators do not give N times the limit."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from coordinator.sessions.shared_quotas import SharedQuotas
from specd import AsyncClient
from specd.caller import CallerLimits
from specd.child import Child
from specd.client import NO_RETRIES
from specd.errors import ResourceExhaustedError
from specd.rpc.credentials import ClientCredentials
from specd.supervisor import Stack
from tests.e2e.faults import ENVIRONMENT
from tests.e2e.guarded import make_tokens
from tests.e2e.session_servers import BINARY, LocalServer

pytestmark = pytest.mark.skipif(BINARY is None, reason="no valkey-server and no redis-server")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with LocalServer(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
async def pair(server: LocalServer, request: pytest.FixtureRequest) -> AsyncIterator[tuple[SharedQuotas, SharedQuotas]]:
    """The quotas of two coordinators."""
    lease = getattr(request, "param", 30.0)
    one, two = (SharedQuotas(server.url, lease_seconds=lease) for _ in range(2))
    yield one, two
    await one.close()
    await two.close()


async def refusal(quotas: SharedQuotas, client: str, limits: CallerLimits) -> str:
    try:
        async with quotas.held(client, limits):
            return ""
    except ResourceExhaustedError as error:
        assert error.retry_after_seconds is not None
        assert error.retry_after_seconds > 0
        return error.reason


async def told(quotas: SharedQuotas) -> None:
    await quotas.scripts.finish()


async def test_sessions_are_counted_over_all_coordinators(pair: tuple[SharedQuotas, SharedQuotas]) -> None:
    one, two = pair
    limits = CallerLimits(max_sessions=2)
    async with one.held("sessions", limits):
        async with two.held("sessions", limits):
            assert await refusal(one, "sessions", limits) == await refusal(two, "sessions", limits) == "CLIENT_SESSIONS"
            assert not await refusal(two, "another client", limits)
        await told(two)
        assert not await refusal(two, "sessions", limits)


async def test_tokens_are_counted_over_all_coordinators_and_come_back(pair: tuple[SharedQuotas, SharedQuotas]) -> None:
    one, two = pair
    limits = CallerLimits(tokens_per_minute=6000)
    one.count("tokens", limits, 3000)
    two.count("tokens", limits, 3020)
    await told(one)
    await told(two)
    assert await refusal(one, "tokens", limits) == await refusal(two, "tokens", limits) == "CLIENT_TOKENS"
    assert not await refusal(two, "another client", limits)
    await asyncio.sleep(0.5)
    assert not await refusal(one, "tokens", limits), "100 tokens a second come back"


@pytest.mark.parametrize("pair", [0.3], indirect=True)
async def test_a_long_request_counts_to_its_end_and_that_of_a_dead_coordinator_soon_no_longer(
    pair: tuple[SharedQuotas, SharedQuotas],
) -> None:
    one, two = pair
    limits = CallerLimits(max_sessions=1)
    async with one.held("leases", limits):
        await asyncio.sleep(0.8)
        assert await refusal(two, "leases", limits) == "CLIENT_SESSIONS"
        one._renewing.cancel()  # as when its process is killed
        await asyncio.sleep(0.4)
        assert not await refusal(two, "leases", limits)


async def test_a_request_that_is_cancelled_before_the_answer_does_not_count(
    pair: tuple[SharedQuotas, SharedQuotas], server: LocalServer
) -> None:
    one, two = pair
    limits = CallerLimits(max_sessions=1)
    assert not await refusal(one, "cancelled", limits)  # it is connected now
    await told(one)
    os.kill(server.process.pid, signal.SIGSTOP)
    asking = asyncio.ensure_future(refusal(one, "cancelled", limits))
    await asyncio.sleep(0.1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    os.kill(server.process.pid, signal.SIGCONT)
    await told(one)
    assert not await refusal(two, "cancelled", limits)


async def test_without_the_server_each_coordinator_counts_alone(tmp_path: Path) -> None:
    with LocalServer(tmp_path) as server:
        one, two = SharedQuotas(server.url), SharedQuotas(server.url)
    limits = CallerLimits(max_sessions=1, tokens_per_minute=10)
    async with one.held("a", limits):
        assert not await refusal(two, "a", limits)
    one.count("a", limits, 20)
    with pytest.raises(ResourceExhaustedError, match="has used its 10 tokens per minute"):
        one.check("a", limits)
    two.check("a", limits)
    await one.close()
    await two.close()


async def asked(client: AsyncClient) -> None:
    async for _ in client.generate("def add(a, b):", max_tokens=1):
        pass


async def test_a_client_of_two_coordinators_has_one_limit(stack: Stack, server: LocalServer, tmp_path: Path) -> None:
    (text,) = make_tokens(tmp_path / "tokens.jsonl", "alice", alice={"sessions": 1})
    options = [f"--target={stack.target.facts['address']}", "--draft=none", f"--session-server={server.url}"]
    options += [f"--tokens={tmp_path}/tokens.jsonl", "--metrics-listen=none"]
    async with AsyncExitStack() as running:
        clients = []
        for name in ("one", "two"):
            command = [sys.executable, "-m", "specd", "coordinator", *options, f"--listen=unix:{tmp_path}/{name}"]
            child = Child("coordinator", command, ENVIRONMENT)
            running.push_async_callback(child.stop)
            await child.start()
            client = AsyncClient(child.facts["address"], credentials=ClientCredentials(token=text), retries=NO_RETRIES)
            clients.append(await running.enter_async_context(client))
        one, two = clients
        stream = one.generate("def add(a, b):", max_tokens=2000, ignore_eos=True)
        await anext(aiter(stream))
        with pytest.raises(ResourceExhaustedError, match="has 1 requests that run or wait"):
            await asked(two)
        await stream.close()
        async with asyncio.timeout(20):
            while True:
                try:
                    await asked(two)
                    break
                except ResourceExhaustedError:
                    await asyncio.sleep(0.1)

"""Sessions outlive their coordinator: what has finished is there when it is back, and nothing is there twice."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from specd.child import Child
from specd.client import NO_RETRIES, AsyncClient
from specd.errors import NotFoundError, SpecdError
from specd.supervisor import Stack
from specd.v1 import session_pb2, session_pb2_grpc
from tests.e2e.faults import ENVIRONMENT
from tests.e2e.processes import PATIENCE_SECONDS, processes_mentioning, run_specd, start_specd
from tests.raw_client import RawClient

PROMPT = "def add(a, b):\n    return"
MAX_TOKENS = 8


@pytest.fixture
async def coordinator(stack: Stack, tmp_path: Path) -> AsyncIterator[Child]:
    """A coordinator of its own, with a session file, in front of the shared workers."""
    workers = {"target": stack.target.facts["address"], "draft": "none"}
    options = {**workers, "listen": f"unix:{tmp_path}/own", "session-file": str(tmp_path / "sessions")}
    flags = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "specd", "coordinator", *flags, "--metrics-listen", "none"]
    child = Child("coordinator", command, ENVIRONMENT)
    await child.start()
    watching = asyncio.create_task(child.run())
    yield child
    watching.cancel()
    await child.stop()


async def turn(client: AsyncClient, session_id: str = "") -> tuple[str, list[int]]:
    """Run a turn of a session, without the help of a client that restores it; return its id and the new tokens."""
    session = client.session(session_id) if session_id else client
    stream = session.generate(PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True, seed=7, temperature=0.7)
    async for _ in stream:
        pass
    return stream.session_id, [token.id for token in stream.tokens]


async def kill(coordinator: Child, client: AsyncClient) -> None:
    """Kill the coordinator, and wait until the next one answers."""
    pid = coordinator.pid
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while coordinator.pid == pid or not await is_there(client):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def is_there(client: AsyncClient) -> bool:
    try:
        return await client.is_serving()
    except SpecdError:
        return False


async def test_a_session_continues_after_its_coordinator_was_killed(coordinator: Child) -> None:
    async with AsyncClient(coordinator.facts["address"]) as client:
        session_id, first = await turn(client)
        _, second = await turn(client, session_id)
        other_id, again = await turn(client)
        assert again == first
        await kill(coordinator, client)
        assert (await turn(client, other_id))[1] == second


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
async def test_no_finished_turn_is_lost_and_none_is_there_twice(coordinator: Child, seed: int) -> None:
    """The coordinator is killed at random moments of turns, and between them."""
    rng = random.Random(seed)
    address = coordinator.facts["address"]
    async with AsyncClient(address, retries=NO_RETRIES) as client, RawClient(address) as raw:
        sessions = cast(Any, session_pb2_grpc.SessionServiceStub(raw.channel))
        session_id, _ = await turn(client)
        num_turns, num_killed = 1, 0
        while num_killed < 6:
            asking = asyncio.ensure_future(turn(client, session_id))
            if rng.random() < 0.5:
                await asyncio.sleep(rng.uniform(0, 0.3))
                await kill(coordinator, client)
                num_killed += 1
            try:
                await asking
                finished = {num_turns + 1}
            except SpecdError:
                finished = {num_turns, num_turns + 1}  # only its last message may be missing
            (kept,) = (await sessions.ListSessions(session_pb2.ListSessionsRequest())).sessions
            assert kept.num_turns in finished
            num_turns = kept.num_turns
        await client.delete_session(session_id)
        await kill(coordinator, client)
        with pytest.raises(NotFoundError):
            await turn(client, session_id)


@pytest.mark.thorough
async def test_up_continues_sessions_after_a_restart(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    options = ("up", "--listen", address, "--no-metrics", "--draft", "lookup")
    variables = {"XDG_CACHE_HOME": str(tmp_path), "SPECD_LOG_LEVEL": "info"}

    async def generate(*arguments: str) -> str:
        done = await asyncio.to_thread(
            run_specd, "generate", "--address", address, "--max-tokens", "8", PROMPT, *arguments
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    async with start_specd(*options, **variables) as running:
        await running.next_line(lambda line: "specd is ready" in line)
        match = re.search("session ([0-9a-f]{16})", await generate())
        assert match is not None
    (file,) = [path for path in (tmp_path / "specd").iterdir() if path.suffix == ".sqlite"]
    assert file.stat().st_mode & 0o777 == 0o600
    async with start_specd(*options, **variables) as running:
        await running.next_line(lambda line: "specd is ready" in line)
        await generate("--session", match[1])
    assert not processes_mentioning(address)

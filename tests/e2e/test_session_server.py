"""Kept sessions on a real Redis server, for several coordinators: no finished turn is lost, and none is kept twice."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from coordinator.sessions.session_server import SessionServer
from coordinator.sessions.session_store import KeptSession, SessionStore
from specd import AsyncClient
from specd.addresses import check_session_server
from specd.child import Child
from specd.errors import ConflictError, NotFoundError, UnavailableError
from specd.supervisor import Stack
from specd.text.chat import Chat
from tests.e2e.faults import ENVIRONMENT
from tests.e2e.session_servers import BINARY, LocalServer

pytestmark = pytest.mark.skipif(BINARY is None, reason="no valkey-server and no redis-server")
IDLE_SECONDS = 100.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with LocalServer(tmp_path_factory.mktemp("server")) as running:
        yield running


class Coordinator:
    """The part of a coordinator that keeps sessions."""

    def __init__(
        self, server: LocalServer, model: str, *, lease_seconds: float = 30.0, idle: float = IDLE_SECONDS
    ) -> None:
        self.num_unsaved = 0
        self.store = SessionStore(idle, 1000, time.time, time.monotonic)
        self.keeper = SessionServer(server.url, model, self.store, idle, self.count, lease_seconds=lease_seconds)
        self.store.on_forget = self.keeper.forget

    def count(self) -> None:
        self.num_unsaved += 1

    async def begin(self, session_id: str, client: str = "a") -> KeptSession:
        """Begin a turn: the first one, or one that continues what is there."""
        try:
            await self.keeper.take(session_id, client)
            return self.store.acquire(session_id, client)
        except NotFoundError:
            return self.store.begin(session_id, client)

    async def finish(self, session: KeptSession, token_ids: list[int], chat: Chat | None = None) -> None:
        self.store.finish(session, token_ids, chat)
        await self.keeper.save(session)

    async def abandon(self, session: KeptSession) -> None:
        self.store.abandon(session)
        self.keeper.release(session.session_id, session.client)
        await self.keeper.scripts.finish()

    async def turn(self, session_id: str, token_ids: list[int], client: str = "a") -> None:
        await self.finish(await self.begin(session_id, client), token_ids)

    async def get(self, session_id: str, client: str = "a") -> list[int]:
        await self.keeper.refresh(client, session_id)
        return list(self.store.get(session_id, client).token_ids)

    async def list(self, client: str = "a") -> list[str]:
        await self.keeper.refresh(client)
        return [each.session_id for each in self.store.list(client)]


@pytest.fixture
async def pair(server: LocalServer, request: pytest.FixtureRequest) -> AsyncIterator[tuple[Coordinator, Coordinator]]:
    """Two coordinators, with keys that no other test has."""
    lease = getattr(request, "param", 30.0)
    one, two = (Coordinator(server, request.node.name, lease_seconds=lease) for _ in range(2))
    yield one, two
    await one.keeper.close()
    await two.keeper.close()


async def test_a_session_continues_at_another_coordinator(pair: tuple[Coordinator, Coordinator]) -> None:
    one, two = pair
    chat = Chat(({"role": "user", "content": "ä"},), special_tokens={0: ((0, 5),)})
    await one.finish(await one.begin("s"), [1, 2], chat)
    session = await two.begin("s")
    assert (list(session.token_ids), session.chat, session.num_turns) == ([1, 2], chat, 1)
    await two.finish(session, [1, 2, 3])
    again = await one.begin("s")
    assert (list(again.token_ids), again.num_turns) == ([1, 2, 3], 2)
    await one.abandon(again)
    assert await two.get("s") == [1, 2, 3]


async def test_a_session_runs_one_turn_at_a_time(pair: tuple[Coordinator, Coordinator]) -> None:
    one, two = pair
    await one.turn("s", [1])
    running = await one.begin("s")
    for other in (one, two):
        with pytest.raises(ConflictError, match="a Generate runs on session s"):
            await other.keeper.take("s", "a")
    with pytest.raises(ConflictError):
        await two.keeper.refresh("a", "s")
        await two.keeper.delete(two.store.get("s", "a"))
    await one.abandon(running)
    await two.turn("s", [1, 2])
    assert await one.get("s") == [1, 2]


@pytest.mark.parametrize("pair", [0.2], indirect=True)
async def test_a_long_turn_keeps_its_lease(pair: tuple[Coordinator, Coordinator]) -> None:
    one, two = pair
    await one.turn("s", [1])
    running = await one.begin("s")
    await asyncio.sleep(0.6)
    with pytest.raises(ConflictError):
        await two.keeper.take("s", "a")
    await one.finish(running, [1, 2])
    assert await two.get("s") == [1, 2]


@pytest.mark.parametrize("pair", [0.2], indirect=True)
async def test_a_coordinator_that_slept_beyond_its_lease_keeps_nothing(pair: tuple[Coordinator, Coordinator]) -> None:
    one, two = pair
    await one.turn("s", [1])
    running = await one.begin("s")
    one.keeper._renewing.cancel()  # as if the process were stopped
    await asyncio.sleep(0.3)
    await two.turn("s", [1, 7])
    await one.finish(running, [1, 2])
    assert one.num_unsaved == 1
    assert await one.get("s") == await two.get("s") == [1, 7]
    # Without another turn in between, it is in time.
    running = await one.begin("s")
    await asyncio.sleep(0.3)
    await one.finish(running, [1, 7, 8])
    assert await two.get("s") == [1, 7, 8]


async def test_owners_and_models_are_kept_apart(server: LocalServer, pair: tuple[Coordinator, Coordinator]) -> None:
    one, two = pair
    await one.turn("s", [1], "a")
    await one.turn("t", [2], "b")
    assert (await two.list("a"), await two.list("b"), await two.list("c")) == (["s"], ["t"], [])
    with pytest.raises(NotFoundError):
        await two.get("s", "b")
    other = Coordinator(server, "another model")
    assert await other.list("a") == []
    await other.keeper.close()


async def test_lists_are_in_the_order_of_use_and_deleted_sessions_are_gone(
    pair: tuple[Coordinator, Coordinator],
) -> None:
    one, two = pair
    for session_id, coordinator in (("x", one), ("y", two), ("z", one)):
        await coordinator.turn(session_id, [1])
        await asyncio.sleep(0.002)
    await two.turn("x", [1, 2])
    assert await one.list() == await two.list() == ["x", "z", "y"]
    await two.keeper.delete(two.store.get("z", "a"))
    two.store.delete("z", "a")
    assert await one.list() == await two.list() == ["x", "y"]
    with pytest.raises(NotFoundError):
        await one.get("z")


async def test_sessions_expire(server: LocalServer) -> None:
    one, two = (Coordinator(server, "expiring", idle=0.2) for _ in range(2))
    await one.turn("s", [1])
    assert await two.list() == ["s"]
    await asyncio.sleep(0.4)
    assert await two.list() == []
    for each in (one, two):
        await each.keeper.close()


async def test_turns_at_two_coordinators_at_once_are_each_kept_once(pair: tuple[Coordinator, Coordinator]) -> None:
    """A hundred turns, each of which appends its number to the session: all are there, in the order of their ends."""
    ended: list[int] = []

    async def work(coordinator: Coordinator, numbers: range) -> None:
        for number in numbers:
            while True:
                try:
                    session = await coordinator.begin("s")
                    break
                except ConflictError:
                    await asyncio.sleep(0.001)
            await asyncio.sleep(0)
            await coordinator.finish(session, [*session.token_ids, number])
            ended.append(number)

    one, two = pair
    await one.turn("s", [1000])
    await asyncio.gather(work(one, range(50)), work(two, range(50, 100)))
    assert await one.get("s") == [1000, *ended]
    assert one.num_unsaved == two.num_unsaved == 0


async def test_where_the_server_is_away_turns_are_not_kept_and_sessions_refused(tmp_path: Path) -> None:
    server = LocalServer(tmp_path)
    one = Coordinator(server, "m")
    await one.turn("s", [1])
    running = await one.begin("s")
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    await one.finish(running, [1, 2])
    assert one.num_unsaved == 1
    for ask in (one.keeper.take("s", "a"), one.keeper.refresh("a"), one.keeper.refresh("a", "s")):
        with pytest.raises(UnavailableError, match="the server that keeps sessions does not answer") as raised:
            await ask
        assert raised.value.reason == "SESSION_SERVER"
    new = one.store.begin("t", "a")
    await one.finish(new, [3])
    assert one.num_unsaved == 2
    assert len(one.store) == 0, "what is not kept is not shown"
    await one.keeper.close()


async def test_a_damaged_session_is_no_session(pair: tuple[Coordinator, Coordinator]) -> None:
    one, two = pair
    await one.turn("s", [1])
    await one.keeper.scripts.redis.hset(one.keeper._key("a", "s"), "content", b"{}")
    with pytest.raises(NotFoundError):
        await two.get("s")


async def test_coordinators_share_their_sessions(stack: Stack, server: LocalServer, tmp_path: Path) -> None:
    """Turns at one, the other, and the one that was killed in between, as if all were at one."""
    options = [f"--target={stack.target.facts['address']}", "--draft=none", f"--session-server={server.url}"]

    async def started(name: str) -> Child:
        command = [sys.executable, "-m", "specd", "coordinator", *options, f"--listen=unix:{tmp_path}/{name}"]
        child = Child("coordinator", [*command, "--metrics-listen=none"], ENVIRONMENT)
        await child.start()
        return child

    async def turn(child: Child, session_id: str = "") -> tuple[str, list[int]]:
        async with AsyncClient(child.facts["address"]) as client:
            turns = client.session(session_id) if session_id else client
            stream = turns.generate("def add(a, b):", max_tokens=6, ignore_eos=True, seed=3, temperature=0.7)
            async for _ in stream:
                pass
            return stream.session_id, [token.id for token in stream.tokens]

    one, two = await started("one"), await started("two")
    try:
        own, first = await turn(one)
        expected = [await turn(one, own) for _ in range(3)]
        session_id, again = await turn(one)
        assert again == first
        answers = [await turn(two, session_id)]
        os.kill(one.pid, signal.SIGKILL)
        assert one.process is not None
        await one.process.wait()
        answers.append(await turn(two, session_id))
        await one.start()
        answers.append(await turn(one, session_id))
        assert [tokens for _, tokens in answers] == [tokens for _, tokens in expected]
    finally:
        await one.stop()
        await two.stop()


def test_urls_of_servers() -> None:
    for url in ("redis://localhost:6379", "rediss://user:secret@host:1/2", "redis://host", "none", ""):
        assert check_session_server(url) == ("" if url == "none" else url)
    for url in ("http://host", "redis://", "redis://host:port", "redis://user:secret@", "host:6379"):
        with pytest.raises(ValueError, match="is not the URL of a Valkey or Redis server") as raised:
            check_session_server(url)
        assert "secret" not in str(raised.value)

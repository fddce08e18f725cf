"""SessionService over a real channel, on a coordinator that has nothing but sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import cast

import grpc
import pytest
from prometheus_client import CollectorRegistry

from coordinator.generation import Coordinator
from coordinator.service import SessionService
from coordinator.sessions.session_store import SessionStore
from coordinator.telemetry.metrics import CoordinatorMetrics
from specd.errors import error_info
from specd.rpc.access import anyone
from specd.rpc.deferred import Deferred
from specd.rpc.refusals import refusing_server
from specd.v1 import session_pb2, session_pb2_grpc

NOW = 1_700_000_000.25
IDLE_SECONDS = 60.0


class FakeCoordinator:
    def __init__(self) -> None:
        self.now = NOW
        self.sessions = SessionStore(IDLE_SECONDS, 100, lambda: self.now, lambda: self.now)

    def decode_text(self, token_ids: Sequence[int]) -> str:
        return " ".join(f"<{token_id}>" for token_id in token_ids)


@pytest.fixture
def coordinator() -> FakeCoordinator:
    return FakeCoordinator()


@pytest.fixture
def deferred(coordinator: FakeCoordinator) -> Deferred[Coordinator]:
    value = Deferred[Coordinator]("the target worker")
    value.set(cast(Coordinator, coordinator))
    return value


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
async def stub(
    deferred: Deferred[Coordinator], registry: CollectorRegistry
) -> AsyncIterator[session_pb2_grpc.SessionServiceStub]:
    server = refusing_server([], anyone)
    service = SessionService(deferred, CoordinatorMetrics(registry))
    session_pb2_grpc.add_SessionServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield session_pb2_grpc.SessionServiceStub(channel)
    await server.stop(None)


async def test_a_session_is_listed_shown_and_deleted(
    stub: session_pb2_grpc.SessionServiceStub, coordinator: FakeCoordinator
) -> None:
    store = coordinator.sessions
    store.finish(store.begin("a", ""), [5, 6, 7], None)
    coordinator.now += 2
    store.finish(store.acquire("a", ""), [5, 6, 7, 8], None)
    store.begin("b", "")

    listed = (await stub.ListSessions(session_pb2.ListSessionsRequest())).sessions
    assert [(s.session_id, s.busy, s.num_tokens, s.num_turns) for s in listed] == [
        ("b", True, 0, 0),
        ("a", False, 4, 2),
    ]
    assert [s.HasField("expires_at") for s in listed] == [False, True]

    shown = await stub.GetSession(session_pb2.GetSessionRequest(session_id="a"))
    assert shown.session == listed[1]
    assert list(shown.token_ids) == [5, 6, 7, 8]
    assert shown.text == "<5> <6> <7> <8>"
    assert shown.session.created_at.ToMicroseconds() == NOW * 1e6
    assert shown.session.last_used_at.ToMicroseconds() == (NOW + 2) * 1e6
    assert shown.session.expires_at.ToMicroseconds() == (NOW + 2 + IDLE_SECONDS) * 1e6

    await stub.DeleteSession(session_pb2.DeleteSessionRequest(session_id="a"))
    assert [s.session_id for s in store.list("")] == ["b"]


@pytest.mark.parametrize(
    ("method", "session_id", "code", "reason"),
    [
        ("GetSession", "nowhere", grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND"),
        ("DeleteSession", "nowhere", grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND"),
        ("DeleteSession", "busy", grpc.StatusCode.ABORTED, "SESSION_BUSY"),
        ("GetSession", "", grpc.StatusCode.INVALID_ARGUMENT, "EMPTY_SESSION_ID"),
        ("DeleteSession", "", grpc.StatusCode.INVALID_ARGUMENT, "EMPTY_SESSION_ID"),
        # More than the headers of an answer have room for.
        ("GetSession", "\N{SNOWMAN}" * 20_000, grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_what_cannot_be_done_has_a_code_and_a_reason_and_is_counted(
    stub: session_pb2_grpc.SessionServiceStub,
    coordinator: FakeCoordinator,
    registry: CollectorRegistry,
    method: str,
    session_id: str,
    code: grpc.StatusCode,
    reason: str,
) -> None:
    coordinator.sessions.begin("busy", "")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await getattr(stub, method)(getattr(session_pb2, f"{method}Request")(session_id=session_id))
    assert error.value.code() is code
    assert error_info(error.value).reason == reason
    assert registry.get_sample_value("specd_errors_total", {"code": code.name, "reason": reason}) == 1


async def test_before_the_workers_have_come_it_says_so(
    stub: session_pb2_grpc.SessionServiceStub, deferred: Deferred[Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred, "_value", None)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.ListSessions(session_pb2.ListSessionsRequest())
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert error_info(error.value).reason == "STARTING"


async def test_a_mistake_of_ours_is_internal_and_keeps_its_words_to_the_log(
    stub: session_pb2_grpc.SessionServiceStub,
    coordinator: FakeCoordinator,
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(token_ids: Sequence[int]) -> str:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(coordinator, "decode_text", fail)
    coordinator.sessions.finish(coordinator.sessions.begin("a", ""), [1], None)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.GetSession(session_pb2.GetSessionRequest(session_id="a"))
    assert error.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(error.value.details())
    assert error_info(error.value).reason == "INTERNAL"
    assert registry.get_sample_value("specd_errors_total", {"code": "INTERNAL", "reason": "INTERNAL"}) == 1

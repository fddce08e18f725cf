"""SessionService over a real channel, on a coordinator that has nothing but sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import grpc
import pytest
from prometheus_client import CollectorRegistry

from coordinator.coordinator import Coordinator
from coordinator.models.models import Models
from coordinator.session_service import SessionService
from coordinator.sessions.session_keeper import SessionKeeper
from coordinator.sessions.session_store import SessionStore
from coordinator.telemetry.metrics import error_counter
from specd.errors import error_info
from specd.model_info import AdapterInfo, ModelInfo
from specd.rpc.access import anyone
from specd.rpc.refusals import refusing_server
from specd.v1 import session_pb2, session_pb2_grpc
from tests.unit.served_models import models_of

MODEL = ModelInfo("base", "llama", "", "", 16, 100, (), "", "", adapters=(AdapterInfo("sql", "d1"),))
NOW = 1_700_000_000.25
IDLE_SECONDS = 60.0


class FakeCoordinator:
    def __init__(self) -> None:
        self.now = NOW
        self.keeper = SessionKeeper()
        self.models = [MODEL]
        self.tokenizer = FakeTokenizer()
        self.sessions = SessionStore(IDLE_SECONDS, 100, lambda: self.now, lambda: self.now)


class FakeTokenizer:
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return " ".join(f"<{token_id}>" for token_id in token_ids)


@pytest.fixture
def coordinator() -> FakeCoordinator:
    return FakeCoordinator()


@pytest.fixture
def models(coordinator: FakeCoordinator) -> Models:
    return models_of(cast(Coordinator, coordinator))


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
async def stub(models: Models, registry: CollectorRegistry) -> AsyncIterator[session_pb2_grpc.SessionServiceStub]:
    server = refusing_server([], anyone)
    service = SessionService(models, error_counter(registry))
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
    store.begin("b", "").adapter = AdapterInfo("sql", "d1")

    listed = (await stub.ListSessions(session_pb2.ListSessionsRequest())).sessions
    assert [(s.session_id, s.busy, s.num_tokens, s.num_turns, s.model) for s in listed] == [
        ("b", True, 0, 0, "sql"),
        ("a", False, 4, 2, "base"),
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
    stub: session_pb2_grpc.SessionServiceStub, models: Models
) -> None:
    models.all[0].coordinator = models.all[0].tokenizer = None
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
    def fail(token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(coordinator.tokenizer, "decode", fail)
    coordinator.sessions.finish(coordinator.sessions.begin("a", ""), [1], None)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.GetSession(session_pb2.GetSessionRequest(session_id="a"))
    assert error.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(error.value.details())
    assert error_info(error.value).reason == "INTERNAL"
    assert registry.get_sample_value("specd_errors_total", {"code": "INTERNAL", "reason": "INTERNAL"}) == 1


async def pages(stub: session_pb2_grpc.SessionServiceStub, page_size: int) -> list[list[str]]:
    """Return the ids of all sessions, a list for each page."""
    found, token = list[list[str]](), ""
    while True:
        answer = await stub.ListSessions(session_pb2.ListSessionsRequest(page_size=page_size, page_token=token))
        found.append([session.session_id for session in answer.sessions])
        token = answer.next_page_token
        if not token:
            return found


async def test_sessions_are_listed_a_page_at_a_time(
    stub: session_pb2_grpc.SessionServiceStub, coordinator: FakeCoordinator
) -> None:
    store = coordinator.sessions
    assert await pages(stub, 3) == [[]]
    for number in range(7):
        store.begin(f"s{number}", "")
        store.begin(f"s{number}", "another")
    assert await pages(stub, 3) == [["s6", "s5", "s4"], ["s3", "s2", "s1"], ["s0"]]
    assert (
        await pages(stub, 7)
        == await pages(stub, 0)
        == await pages(stub, 2**31 - 1)
        == [[f"s{i}" for i in (*"6543210",)]]
    )


async def test_a_page_has_a_thousand_sessions_at_most(
    stub: session_pb2_grpc.SessionServiceStub, coordinator: FakeCoordinator
) -> None:
    for number in range(2500):
        coordinator.sessions.begin(f"s{number}", "")
    for page_size in (0, 1000, 1001):
        assert [len(page) for page in await pages(stub, page_size)] == [1000, 1000, 500]


async def test_what_is_used_or_deleted_between_two_pages_hides_no_other(
    stub: session_pb2_grpc.SessionServiceStub, coordinator: FakeCoordinator
) -> None:
    store = coordinator.sessions
    for number in range(6):
        store.finish(store.begin(f"s{number}", ""), [1], None)
    first = await stub.ListSessions(session_pb2.ListSessionsRequest(page_size=2))
    assert [session.session_id for session in first.sessions] == ["s5", "s4"]
    store.delete("s4", "")  # at which the page ended
    store.acquire("s2", "")
    rest = await stub.ListSessions(session_pb2.ListSessionsRequest(page_token=first.next_page_token))
    assert [session.session_id for session in rest.sessions] == ["s3", "s1", "s0"]


@pytest.mark.parametrize(
    "fields", [{"page_size": -1}, {"page_token": "-1"}, {"page_token": "s4"}, {"page_token": "f" * 5000}], ids=str
)
async def test_a_page_that_cannot_be_is_refused(
    stub: session_pb2_grpc.SessionServiceStub, fields: dict[str, Any]
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.ListSessions(session_pb2.ListSessionsRequest(**fields))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_info(error.value).reason == "OUT_OF_RANGE"

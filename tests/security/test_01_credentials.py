"""Check 1: every call of every process, and its metrics, without credentials, with wrong ones and with expired ones."""

from __future__ import annotations

import asyncio
import http.client
import shutil
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2  # noqa: F401 - describes its service
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specd.identity.roles import Role
from specd.identity.tokens import new_token
from specd.rpc.access import ANYBODY, MAY_CALL
from specd.rpc.channel import open_channel
from specd.rpc.credentials import PLAIN, ClientCredentials
from specd.v1 import draft_pb2, generation_pb2, multiplex_pb2, session_pb2, target_pb2
from tests.e2e.guarded import (
    NAMES,
    Guarded,
    credentials,
    expire,
    guarded,
    make_certificates,
    read_metrics_over_tls,
    workers_of,
    write_token,
)
from tests.e2e.processes import PATIENCE_SECONDS, start_specd
from tests.security.http_door import pipelined

# The descriptors of all that a process can have.
FILES = [each.DESCRIPTOR for each in (draft_pb2, generation_pb2, multiplex_pb2, session_pb2, target_pb2)]

# Who may call the methods of each process. BY_TOKEN is a coordinator that asks for tokens.
PEERS = {Role.DRAFT_WORKER: Role.COORDINATOR, Role.TARGET_WORKER: Role.COORDINATOR, Role.COORDINATOR: Role.CLIENT}
BY_TOKEN = "coordinator by token"
PROCESSES = [*PEERS, BY_TOKEN]


class Tokens:
    """A client's token, and those of others who have none any more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        yesterday = datetime.now(UTC) - timedelta(days=1)
        self.expired, expired = new_token("late", expires=yesterday)
        self.revoked, _ = new_token("gone")
        self.good = write_token(path, "alice", expired)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return Tokens(tmp_path_factory.mktemp("tokens") / "tokens.jsonl")


@pytest.fixture(scope="module")
async def installation(tmp_path_factory: pytest.TempPathFactory, tokens: Tokens) -> AsyncIterator[Guarded]:
    """Processes that take certificates, and a second coordinator that takes tokens."""
    async with guarded(tmp_path_factory.mktemp("certs") / "ours") as running, AsyncExitStack() as stack:
        options = [*workers_of(running), "--tokens", str(tokens.path)]
        await running.start(stack, Role.COORDINATOR, *options, name=BY_TOKEN)
        yield running


@pytest.fixture(scope="module")
def wrong(installation: Guarded, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ClientCredentials]:
    """Credentials that open no connection to a process that asks for certificates."""
    ours = installation.certs
    theirs = make_certificates(tmp_path_factory.mktemp("certs") / "theirs")
    late = Path(shutil.copytree(ours, tmp_path_factory.mktemp("certs") / "late"))
    for role in Role:
        expire(late, role)
    stranger = credentials(theirs, Role.CLIENT)
    return {
        "plaintext": PLAIN,
        "no certificate": credentials(ours),
        "another authority's certificate": ClientCredentials(ours / "ca.crt", stranger.cert, stranger.key),
        "an expired certificate": credentials(late, Role.CLIENT),
        "an expired certificate of the role": credentials(late, Role.COORDINATOR),
        "trust in another authority": credentials(theirs, Role.CLIENT),
    }


def named(given: ClientCredentials, process: str) -> ClientCredentials:
    """Return credentials that expect the name of a process's certificate."""
    name = NAMES[process if process in NAMES else Role.COORDINATOR]
    return ClientCredentials(given.ca, given.cert, given.key, given.token, name)


async def status_of(
    address: str, given: ClientCredentials, method: str, metadata: Sequence[tuple[str, str]] = ()
) -> grpc.StatusCode:
    """Call a method with an empty request, and return how it ends; OK as soon as there is an answer."""
    (status,) = await statuses_of(address, given, [(method, metadata)])
    return status


async def statuses_of(
    address: str, given: ClientCredentials, calls: Sequence[tuple[str, Sequence[tuple[str, str]]]]
) -> list[grpc.StatusCode]:
    """Return the same for calls that run at once on one connection, each a method and its metadata."""
    async with open_channel(address, given) as channel:

        async def status(method: str, metadata: Sequence[tuple[str, str]]) -> grpc.StatusCode:
            # Request and end go out at once. A client that writes on when the answer has come makes INTERNAL of it.
            multicallable: Any = channel.unary_stream(method)
            call = multicallable(b"", metadata=tuple(metadata), timeout=PATIENCE_SECONDS)
            try:
                await call.read()
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK if not call.done() else await call.code()

        return await asyncio.gather(*(status(method, metadata) for method, metadata in calls))


async def methods_of(address: str, given: ClientCredentials) -> list[str]:
    """Return the methods that a process has, as its reflection and their descriptors say."""
    async with open_channel(address, given) as channel:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(cast(Any, channel))
        (answer,) = [each async for each in stub.ServerReflectionInfo(iter([request]))]
    names = [service.name for service in answer.list_services_response.service]
    services = map(descriptor_pool.Default().FindServiceByName, names)
    return [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]


def right(installation: Guarded, tokens: Tokens, process: str) -> ClientCredentials:
    """Return credentials that open a process."""
    if process == BY_TOKEN:
        return named(credentials(installation.certs, token=tokens.good), process)
    return named(credentials(installation.certs, PEERS[Role(process)]), process)


@pytest.mark.parametrize("process", PROCESSES)
async def test_there_is_a_rule_for_each_method_that_a_process_has(
    installation: Guarded, tokens: Tokens, process: str
) -> None:
    methods = await methods_of(installation.address(process), right(installation, tokens, process))
    assert set(methods) == set(MAY_CALL[Role.COORDINATOR if process == BY_TOKEN else Role(process)])


@pytest.mark.parametrize("process", PROCESSES)
async def test_the_right_credentials_open_every_method(installation: Guarded, tokens: Tokens, process: str) -> None:
    """An empty request can be refused for any reason but the caller."""
    given, address = right(installation, tokens, process), installation.address(process)
    for method in await methods_of(address, given):
        status = await status_of(address, given, method)
        assert status not in DENIALS | {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED}, method


DENIALS = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}


@pytest.mark.parametrize("process", PEERS)
async def test_no_method_answers_who_has_not_the_certificate(
    installation: Guarded, tokens: Tokens, wrong: dict[str, ClientCredentials], process: Role
) -> None:
    address = installation.address(process)
    methods = await methods_of(address, right(installation, tokens, process))
    assert len(methods) > 5
    for what, given in wrong.items():
        for method in methods:
            assert await status_of(address, named(given, process), method) is grpc.StatusCode.UNAVAILABLE, what


async def test_no_method_answers_who_has_not_the_token(installation: Guarded, tokens: Tokens) -> None:
    """But health, which says nothing of anybody."""
    address, trusting = installation.address(BY_TOKEN), credentials(installation.certs)
    table = MAY_CALL[Role.COORDINATOR]
    wrong_metadata: dict[str, list[tuple[str, str]]] = {
        "none": [],
        "unknown": [("authorization", "Bearer specd_unknown")],
        "expired": [("authorization", f"Bearer {tokens.expired}")],
        "revoked": [("authorization", f"Bearer {tokens.revoked}")],
        "twice": [("authorization", f"Bearer {tokens.good}")] * 2,
        "other scheme": [("authorization", f"Basic {tokens.good}")],
        "other key": [("token", tokens.good)],
    }
    for method in await methods_of(address, right(installation, tokens, BY_TOKEN)):
        for what, metadata in wrong_metadata.items():
            status = await status_of(address, trusting, method, metadata)
            expected = grpc.StatusCode.OK if table[method] is ANYBODY else grpc.StatusCode.UNAUTHENTICATED
            assert (method, what, status) == (method, what, expected)


async def test_a_token_on_a_connection_counts_for_its_own_call_alone(installation: Guarded, tokens: Tokens) -> None:
    """Simultaneous calls on one connection each have a token of their own, or no token."""
    method = "/specd.v1.SessionService/ListSessions"
    good, bad = [("authorization", f"Bearer {tokens.good}")], [("authorization", f"Bearer {tokens.expired}")]
    calls: list[tuple[str, Sequence[tuple[str, str]]]] = [(method, metadata) for metadata in (good, (), bad) * 5]
    statuses = await statuses_of(installation.address(BY_TOKEN), credentials(installation.certs), calls)
    denied = grpc.StatusCode.UNAUTHENTICATED
    assert statuses == [grpc.StatusCode.OK, denied, denied] * 5


async def test_a_token_on_a_connection_counts_for_its_own_request_alone(installation: Guarded, tokens: Tokens) -> None:
    """The same at the gateway, whose later requests come pipelined."""
    certs = installation.certs
    options = ["--tls-cert", str(certs / "gateway.crt"), "--tls-key", str(certs / "gateway.key")]
    options += ["--coordinator", installation.address(BY_TOKEN), "--coordinator-ca", str(certs / "ca.crt")]
    async with start_specd("gateway", "--listen", "0.0.0.0:0", *options) as running:
        port = (await running.next_event("ready"))["address"].rpartition(":")[2]
        good, bad = f"authorization: Bearer {tokens.good}", f"authorization: Bearer {tokens.expired}"
        requests = [(path, header) for path in ("/v1/models", "/metrics") for header in (good, "", bad)] * 2
        trusting = ssl.create_default_context(cafile=certs / "ca.crt")
        assert await pipelined(f"127.0.0.1:{port}", requests, trusting) == [200, 401, 401] * 4


async def test_a_certificate_is_no_token(installation: Guarded) -> None:
    given = credentials(installation.certs, Role.CLIENT)
    method = "/specd.v1.SessionService/ListSessions"
    assert await status_of(installation.address(BY_TOKEN), given, method) is grpc.StatusCode.UNAUTHENTICATED


async def test_a_token_does_not_go_out_over_plaintext_or_to_another_authority(
    installation: Guarded, wrong: dict[str, ClientCredentials], tokens: Tokens
) -> None:
    for what in ("plaintext", "trust in another authority"):
        given = ClientCredentials(wrong[what].ca, token=tokens.good)
        status = await status_of(installation.address(BY_TOKEN), given, "/specd.v1.GenerationService/GetModelInfo")
        assert status is grpc.StatusCode.UNAVAILABLE, what


@pytest.mark.parametrize("process", PROCESSES)
async def test_metrics_are_for_monitoring_alone(
    installation: Guarded, wrong: dict[str, ClientCredentials], process: str
) -> None:
    child = installation.children[process]
    status, text = await asyncio.to_thread(
        read_metrics_over_tls, child, credentials(installation.certs, Role.MONITORING)
    )
    assert (status, "specd_build_info" in text) == (200, True)
    for role in set(Role) - {Role.MONITORING}:
        status, text = await asyncio.to_thread(read_metrics_over_tls, child, credentials(installation.certs, role))
        assert (status, "specd_" in text) == (403, False), role
    for what, given in wrong.items():
        if given.ca is not None:
            with pytest.raises((OSError, http.client.HTTPException)):
                print(what, await asyncio.to_thread(read_metrics_over_tls, child, given))


@pytest.mark.parametrize("process", PROCESSES)
def test_metrics_answer_nothing_over_plaintext(installation: Guarded, process: str) -> None:
    connection = http.client.HTTPConnection(installation.children[process].facts["metrics_address"], timeout=20)
    with pytest.raises((OSError, http.client.HTTPException)):
        connection.request("GET", "/metrics")
        print(connection.getresponse().read())
    connection.close()

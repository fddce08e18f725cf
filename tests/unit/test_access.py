"""The caller, as a service sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest

from specd.caller import Caller, CallerLimits
from specd.errors import UnauthenticatedError, error_info
from specd.identity.certificates import CertificateFiles, Certificates
from specd.identity.roles import Role
from specd.rpc.access import Guard, current_caller
from specd.rpc.channel import open_channel
from specd.rpc.credentials import ClientCredentials
from specd.rpc.refusals import refusing_server
from specd.rpc.server import Server
from tests.e2e.guarded import make_certificates, make_client

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


async def unary(request: bytes, context: Context) -> bytes:
    return current_caller().name.encode()


async def generate(request: bytes, context: Context) -> AsyncIterator[bytes]:
    yield current_caller().name.encode()


async def read(_: Any, context: Context) -> None:
    while await context.read() is not grpc.aio.EOF:
        await asyncio.sleep(0.01)  # other calls run during the pause
        await context.write(current_caller().name.encode())


HANDLERS: dict[str, Any] = {
    "unary": grpc.unary_unary_rpc_method_handler(unary),
    "generate": grpc.unary_stream_rpc_method_handler(generate),
    "read": grpc.stream_stream_rpc_method_handler(read),
}


def identify(method: str, context: Context) -> Caller:
    name = str(dict(context.invocation_metadata() or ()).get("name", ""))
    if not name:
        raise UnauthenticatedError("NO_NAME", f"{method} wants a name")
    return Caller(name, CallerLimits(max_tokens=len(name)))


@pytest.fixture
async def channel(tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    server = refusing_server([], identify)
    server.add_registered_method_handlers("test", HANDLERS)
    server.add_insecure_port(f"unix:{tmp_path}/server")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/server") as connected:
        yield connected
    await server.stop(None)


async def call(channel: grpc.aio.Channel, method: str, **metadata: str) -> list[bytes]:
    async with asyncio.timeout(20):
        # Request and end go out at once: a client that writes on when a refusal has come makes INTERNAL of it.
        multicallable: Any = channel.unary_stream(f"/test/{method}")
        running = multicallable(b"one", metadata=tuple(metadata.items()))
        return [answer async for answer in running]


@pytest.mark.parametrize("method", HANDLERS)
async def test_calls_at_the_same_time_each_have_their_own_caller(channel: grpc.aio.Channel, method: str) -> None:
    names = [f"client-{i}" for i in range(20)]
    answers = await asyncio.gather(*(call(channel, method, name=name) for name in names))
    assert answers == [[name.encode()] for name in names]
    with pytest.raises(LookupError):
        current_caller()


@pytest.mark.parametrize("method", HANDLERS)
async def test_a_caller_who_is_not_known_is_refused_with_a_reason(channel: grpc.aio.Channel, method: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(channel, method)
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert error_info(raised.value).reason == "NO_NAME"
    assert f"/test/{method} wants a name" in str(raised.value.details())


# -- Certificates


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_certificates(tmp_path_factory.mktemp("certs") / "made")
    for file, names in {
        "nameless": [],
        "empty": [""],
        "blank": [" "],
        "several": ["alice", "bob"],
        "nul": ["alice\0.example.org"],
        "alice": ["alice"],
        "zoe": ["Zoë Åkerström"],
    }.items():
        make_client(directory, file, names)
    make_client(directory, "nul in the role", ["alice"], role_name="client.specd.internal\0.example.org")
    make_client(directory, "no role", ["alice"], role_name="host.example.org")
    make_client(directory, "nameless coordinator", [], role_name=Role.COORDINATOR.dns_name)
    return directory


@asynccontextmanager
async def guarded_by_certificate(certs: Path, process: Role) -> AsyncIterator[str]:
    """Serve a method of the coordinator's and one of a worker's, which answer with the name of their caller."""
    files = CertificateFiles(certs / f"{process}.crt", certs / f"{process}.key", certs / "ca.crt")
    listen = "127.0.0.1:0"
    guard = Guard(process, listen=listen, certificates=Certificates(files, role=process))
    server = Server(listen, (), guard)
    for service, method in (("SessionService", "ListSessions"), ("ModelService", "Describe")):
        server.grpc.add_registered_method_handlers(
            f"specd.v1.{service}", {method: grpc.unary_unary_rpc_method_handler(unary)}
        )
    await server.start()
    yield server.address
    await server.stop(0)


async def name_by_certificate(address: str, certs: Path, process: Role, method: str, file: str) -> str:
    """Return as whom a process knows the owner of a certificate; raises the refusal."""
    shown = ClientCredentials(
        certs / "ca.crt", certs / f"{file}.crt", certs / f"{file}.key", server_name=process.dns_name
    )
    async with open_channel(address, shown) as channel:
        call: Any = channel.unary_unary(method)
        answer: bytes = await call(b"", timeout=20)
        return answer.decode()


LIST_SESSIONS, DESCRIBE = "/specd.v1.SessionService/ListSessions", "/specd.v1.ModelService/Describe"


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("nameless", "has no common names"),
        ("empty", "is ''"),
        ("blank", "is ' '"),
        ("several", "has 2 common names"),
        ("nul", "is 'alice\\x00.example.org'"),
        ("nul in the role", "is for the certificate of a client"),
        ("no role", "is for the certificate of a client"),
    ],
)
async def test_a_certificate_without_one_name_of_its_own_is_no_client(certs: Path, file: str, why: str) -> None:
    process = Role.COORDINATOR
    async with guarded_by_certificate(certs, process) as address:
        assert await name_by_certificate(address, certs, process, LIST_SESSIONS, "alice") == "alice"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await name_by_certificate(address, certs, process, LIST_SESSIONS, file)
    assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert error_info(raised.value).reason == "ROLE_DENIED"
    assert why in str(raised.value.details())


async def test_a_client_is_the_name_in_its_certificate(certs: Path) -> None:
    process = Role.COORDINATOR
    async with guarded_by_certificate(certs, process) as address:
        for file, name in {"client": "client", "zoe": "Zoë Åkerström"}.items():
            assert await name_by_certificate(address, certs, process, LIST_SESSIONS, file) == name


@pytest.mark.parametrize("file", ["coordinator", "nameless coordinator"])
async def test_a_worker_knows_its_coordinator_by_its_role(certs: Path, file: str) -> None:
    process = Role.TARGET_WORKER
    async with guarded_by_certificate(certs, process) as address:
        assert await name_by_certificate(address, certs, process, DESCRIBE, file) == "coordinator"

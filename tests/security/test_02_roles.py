"""Check 2: a client's certificate opens no worker, a draft's opens no target, and so on for each role and call."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator

import grpc
import pytest

from specd.identity.roles import Role
from specd.rpc.access import ANYBODY, MAY_CALL
from tests.e2e.guarded import Guarded, credentials, files_of, guarded
from tests.e2e.processes import start_specd
from tests.security.http_door import pipelined
from tests.security.test_01_credentials import DENIALS, named, status_of, statuses_of

SERVERS = list(MAY_CALL)


@pytest.fixture(scope="module")
async def installation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    async with guarded(tmp_path_factory.mktemp("certs") / "ours") as running:
        yield running


@pytest.mark.parametrize("caller", Role)
@pytest.mark.parametrize("process", SERVERS)
async def test_a_role_opens_what_the_table_says_and_nothing_else(
    installation: Guarded, process: Role, caller: Role
) -> None:
    """A denial comes before the request is looked at."""
    given, address = named(credentials(installation.certs, caller), process), installation.address(process)
    for method, allowed in MAY_CALL[process].items():
        status = await status_of(address, given, method)
        if caller in allowed:
            assert status not in DENIALS | {grpc.StatusCode.UNAVAILABLE}, method
        else:
            assert status is grpc.StatusCode.PERMISSION_DENIED, method


@pytest.mark.parametrize("caller", Role)
@pytest.mark.parametrize("process", SERVERS)
async def test_each_of_the_calls_at_once_on_a_connection_is_denied_or_not(
    installation: Guarded, process: Role, caller: Role
) -> None:
    given, address = named(credentials(installation.certs, caller), process), installation.address(process)
    table = MAY_CALL[process]
    calls = [(method, ()) for method in table for _ in range(3)]
    for (method, _), status in zip(calls, await statuses_of(address, given, calls), strict=True):
        assert (status is grpc.StatusCode.PERMISSION_DENIED) == (caller not in table[method]), method


@pytest.fixture(scope="module")
async def gateway(installation: Guarded) -> AsyncIterator[str]:
    """The address of a gateway that asks for certificates."""
    coordinator = installation.address(Role.COORDINATOR)
    own = files_of(installation.certs, Role.GATEWAY)
    options = [*own, "--coordinator", coordinator]
    options += [f"--coordinator-{option.removeprefix('--tls-')}" if option[:2] == "--" else option for option in own]
    async with start_specd("gateway", "--listen", "127.0.0.1:0", *options) as running:
        yield (await running.next_event("ready"))["address"]


@pytest.mark.parametrize("caller", Role)
async def test_each_of_the_requests_at_once_on_a_connection_is_denied_or_not(
    installation: Guarded, gateway: str, caller: Role
) -> None:
    """A later request of a connection has the roles of the first."""
    trusting = ssl.create_default_context(cafile=installation.certs / "ca.crt")
    trusting.load_cert_chain(installation.certs / f"{caller}.crt", installation.certs / f"{caller}.key")
    expected = {
        "/v1/models": 200 if caller is Role.CLIENT else 403,
        "/metrics": 200 if caller is Role.MONITORING else 403,
        "/health": 200,
    }
    paths = list(expected) * 3
    statuses = await pipelined(gateway, [(path, "") for path in paths], trusting)
    assert list(zip(paths, statuses, strict=True)) == [(path, expected[path]) for path in paths]


@pytest.mark.parametrize(("worker", "poser"), [("target", Role.DRAFT_WORKER), ("draft", Role.TARGET_WORKER)])
async def test_a_coordinator_knows_its_workers_by_their_role(installation: Guarded, worker: str, poser: Role) -> None:
    """A draft's certificate at the target's address brings no session to it, and the other way round."""
    addresses = {"target": installation.address(Role.TARGET_WORKER), "draft": installation.address(Role.DRAFT_WORKER)}
    addresses[worker] = installation.address(poser)
    options = [*files_of(installation.certs, Role.COORDINATOR), "--listen", "127.0.0.1:0", "--metrics-listen", "none"]
    options += [f"--{name}={address}" for name, address in addresses.items()]
    async with start_specd("coordinator", *options) as coordinator:
        waiting = await coordinator.next_event("waiting for a worker", worker=worker)
        assert (
            f"the certificate of {installation.address(poser)} is not for {worker}-worker.specd.internal"
            in waiting["why"]
        )


def test_the_table_lets_each_in_where_it_belongs_and_no_further() -> None:
    """Each role can call its own methods and no others."""
    for process, table in MAY_CALL.items():
        for method, allowed in table.items():
            if allowed is not ANYBODY:
                expected = {Role.CLIENT if process is Role.COORDINATOR else Role.COORDINATOR}
                if method.startswith("/specd.v1.GenerationService/"):
                    expected |= {Role.GATEWAY}
                assert allowed == expected, method
        assert {method.split("/")[1] for method, allowed in table.items() if allowed is ANYBODY} == {
            "grpc.health.v1.Health"
        }

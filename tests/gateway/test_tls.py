"""The gateway over TLS: its certificate, those of its clients, and tokens where other machines reach it."""

from __future__ import annotations

import asyncio
import http.client
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from cryptography import x509
from openai import AsyncOpenAI

from specd.identity.authority import Authority
from specd.identity.roles import Role
from tests.e2e.guarded import Guarded, expire, files_of, guarded, make_certificates, workers_of, write_token
from tests.e2e.processes import PATIENCE_SECONDS, run_specd, start_specd

PROMPT = "def area(r):"


@pytest.fixture(scope="module")
async def installation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    """Processes with certificates, and a coordinator that takes tokens, one of which is in `token`."""
    async with guarded(tmp_path_factory.mktemp("certs")) as running, AsyncExitStack() as stack:
        tokens = running.certs / "tokens.jsonl"
        (running.certs / "token").write_text(write_token(tokens, "alice"))
        await running.start(stack, Role.COORDINATOR, *workers_of(running), "--tokens", str(tokens), name="by token")
        yield running


@asynccontextmanager
async def gateway(
    installation: Guarded, *options: str, coordinator: str = "coordinator", certs: Path | None = None
) -> AsyncIterator[int]:
    """Run a gateway that shows its certificate to clients and coordinator, and yield its port."""
    certs = certs or installation.certs
    own = [str(certs / f"gateway.{ending}") for ending in ("crt", "key")]
    ca = str(installation.certs / "ca.crt")
    async with start_specd(
        *("gateway", "--tls-cert", own[0], "--tls-key", own[1]),
        *("--coordinator", installation.address(coordinator), "--coordinator-ca", ca),
        *("--coordinator-cert", own[0], "--coordinator-key", own[1], *options),
    ) as running:
        ready = await running.next_event("ready")
        assert ready["metrics_url"].startswith("https://")
        yield int(ready["address"].rpartition(":")[2])


async def get(
    port: int, path: str, ca: Path, certificate: tuple[Path, Path] | None = None, **headers: str
) -> tuple[int, str]:
    """Return status and body; 0 for a connection that is refused."""

    def ask() -> tuple[int, str]:
        context = ssl.create_default_context(cafile=ca)
        if certificate is not None:
            context.load_cert_chain(*certificate)
        connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=PATIENCE_SECONDS)
        try:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        except (ssl.SSLError, ConnectionError):
            return 0, ""
        finally:
            connection.close()

    return await asyncio.to_thread(ask)


def certificate_of(certs: Path, role: Role) -> tuple[Path, Path]:
    return certs / f"{role}.crt", certs / f"{role}.key"


async def test_a_client_asks_over_tls_and_a_new_certificate_is_taken_without_a_restart(
    installation: Guarded, tmp_path: Path
) -> None:
    certs = make_certificates(tmp_path)
    trusted = ssl.create_default_context(cafile=certs / "ca.crt")
    async with gateway(installation, "--listen", "127.0.0.1:0", coordinator="by token", certs=certs) as port:
        options: dict[str, Any] = {"base_url": f"https://localhost:{port}/v1", "max_retries": 0}
        token = (installation.certs / "token").read_text()
        async with AsyncOpenAI(**options, api_key=token, http_client=httpx2.AsyncClient(verify=trusted)) as client:
            completion = await client.completions.create(model="", prompt=PROMPT, max_tokens=8, temperature=0)
            assert completion.usage is not None
            assert completion.usage.completion_tokens == 8

            def shown() -> int:
                return x509.load_pem_x509_certificate(
                    ssl.get_server_certificate(("localhost", port)).encode()
                ).serial_number

            before = await asyncio.to_thread(shown)
            leaves = {leaf.role: leaf for leaf in Authority(certs).leaves()}
            Authority(certs).issue(leaves[Role.GATEWAY], days=20, replace=True)
            after = await asyncio.to_thread(shown)
            assert after != before
            expected = x509.load_pem_x509_certificate((certs / "gateway.crt").read_bytes()).serial_number
            assert after == expected
            again = await client.completions.create(model="", prompt=PROMPT, max_tokens=8, temperature=0)
            assert again.choices[0].text == completion.choices[0].text
        assert (await get(port, "/health", installation.certs / "ca.crt"))[0] == 0  # another authority
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"HTTP" not in await reader.read()
        writer.close()


async def test_a_certificate_opens_what_its_role_is_for(installation: Guarded, tmp_path: Path) -> None:
    certs, ca = installation.certs, installation.certs / "ca.crt"
    async with gateway(installation, "--listen", "127.0.0.1:0", "--tls-ca", str(ca)) as port:
        for role in Role:
            models, _ = await get(port, "/v1/models", ca, certificate_of(certs, role))
            metrics, _ = await get(port, "/metrics", ca, certificate_of(certs, role))
            for path in ("/health", "/", "/openapi.json"):
                assert (await get(port, path, ca, certificate_of(certs, role)))[0] == 200, (path, role)
            assert (models, metrics) == (
                200 if role is Role.CLIENT else 403,
                200 if role is Role.MONITORING else 403,
            ), role
        for certificate in (None, certificate_of(make_certificates(tmp_path), Role.CLIENT)):
            assert (await get(port, "/v1/models", ca, certificate))[0] == 0
        expire(certs, Role.CLIENT)
        assert (await get(port, "/v1/models", ca, certificate_of(certs, Role.CLIENT)))[0] == 0


async def test_where_others_reach_it_nothing_is_told_without_a_token(installation: Guarded) -> None:
    ca, token = installation.certs / "ca.crt", (installation.certs / "token").read_text()
    async with gateway(installation, "--listen", "0.0.0.0:0", coordinator="by token") as port:
        for path in ("/v1/models", "/metrics"):
            assert (await get(port, path, ca))[0] == 401
            assert (await get(port, path, ca, authorization="Bearer specd_wrong"))[0] == 401
            assert (await get(port, path, ca, authorization=f"Bearer {token}"))[0] == 200


async def test_where_others_reach_it_a_coordinator_that_asks_for_no_tokens_is_not_used(installation: Guarded) -> None:
    """The gateway's own certificate would let everyone in."""
    ca = installation.certs / "ca.crt"
    async with gateway(installation, "--listen", "0.0.0.0:0") as port:
        for path in ("/v1/models", "/metrics"):
            status, body = await get(port, path, ca)
            assert status == 503
            assert "--tokens" in body


async def test_a_coordinator_is_known_by_a_name_that_is_not_its_address(installation: Guarded) -> None:
    ca = installation.certs / "ca.crt"
    for name, status in (("coordinator.specd.internal", 200), ("elsewhere.example.org", 503)):
        options = ("--listen", "127.0.0.1:0", "--coordinator-name", name)
        async with gateway(installation, *options, coordinator="by token") as port:
            statuses = [(await get(port, "/health", ca))[0] for _ in range(3)]  # the first may find it slow
            assert status in statuses
            assert set(statuses) <= {status, 503}


async def test_the_log_says_why_the_coordinator_cannot_be_reached(installation: Guarded) -> None:
    options = [
        "--coordinator",
        installation.address("by token"),
        "--coordinator-ca",
        str(installation.certs / "ca.crt"),
    ]
    options += ["--coordinator-name", "elsewhere.example.org", "--listen", "127.0.0.1:0"]
    async with start_specd("gateway", *options) as running:
        event = await running.next_event("the coordinator does not serve yet")
        assert "is not for elsewhere.example.org: set --coordinator-name" in event["why"]


def test_without_tls_it_listens_to_this_machine_alone() -> None:
    done = run_specd("gateway", "--listen", "0.0.0.0:0")
    assert done.returncode != 0
    assert "--tls-cert" in done.stderr
    assert "--insecure" in done.stderr


def test_certificates_that_cannot_be_used_are_named(installation: Guarded) -> None:
    options = files_of(installation.certs, Role.GATEWAY)
    options[1] = str(installation.certs / f"{Role.CLIENT}.crt")
    done = run_specd("gateway", "--listen", "127.0.0.1:0", *options)
    assert done.returncode != 0
    assert "does not belong to the certificate" in done.stderr


def test_half_a_certificate_for_the_coordinator_is_named_by_the_gateways_options(installation: Guarded) -> None:
    certificate = str(installation.certs / f"{Role.GATEWAY}.crt")
    done = run_specd("gateway", "--listen", "127.0.0.1:0", "--coordinator-cert", certificate)
    assert done.returncode != 0
    assert "set both --coordinator-cert and --coordinator-key" in done.stderr

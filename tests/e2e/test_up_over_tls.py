"""`specd up` for other machines, with TLS: its gateway finds its own coordinator, and lets in whom that lets in."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import ssl
from dataclasses import dataclass
from pathlib import Path

import pytest

from specd.identity.authority import Authority, Leaf
from specd.identity.roles import Role
from tests.e2e.guarded import files_of, make_certificates, write_token
from tests.e2e.processes import PATIENCE_SECONDS, RunningSpecd, run_specd, start_specd
from tests.thorough import examples

UP = ("up", "--listen", "0.0.0.0:0", "--http", "0.0.0.0:0", "--no-metrics")


@dataclass
class Installation:
    """Certificates and a client's token."""

    certs: Path
    tokens: Path
    token: str

    def own(self, name: str) -> str:
        return str(self.certs / name)


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    certs = make_certificates(tmp_path_factory.mktemp("certs"))
    # As of a public authority: it has no name of this machine.
    Authority(certs).issue(Leaf("named", "named", Role.COORDINATOR, ("gpu.example.org",)), days=30, replace=False)
    return Installation(certs, certs / "tokens.jsonl", write_token(certs / "tokens.jsonl", "alice"))


async def places(up: RunningSpecd) -> tuple[str, int, str]:
    """Return where the coordinator of a `specd up` listens, the port of its gateway, and the command to try."""
    ready = await up.next_line(lambda line: "specd is ready at " in line)
    api = await up.next_line(lambda line: "OpenAI's API: https://0.0.0.0:" in line)
    port = re.search(r"0\.0\.0\.0:(\d+)", ready)
    assert port is not None
    command = await up.next_line(lambda line: "try: " in line)
    http = re.search(r"https://0\.0\.0\.0:(\d+)/v1", api)
    assert http is not None
    return f"127.0.0.1:{port[1]}", int(http[1]), command


async def status_of(
    installation: Installation, port: int, *, token: str = "", role: Role | None = None, host: str = "localhost"
) -> int:
    """Return how the gateway answers a completion; 0 if TLS fails."""

    def ask() -> int:
        context = ssl.create_default_context(cafile=installation.certs / "ca.crt")
        context.check_hostname = host == "localhost"
        if role is not None:
            context.load_cert_chain(installation.own(f"{role}.crt"), installation.own(f"{role}.key"))
        connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=PATIENCE_SECONDS)
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {token}"} if token else {})}
        try:
            connection.request("POST", "/v1/completions", json.dumps({"prompt": "def", "max_tokens": 4}), headers)
            return connection.getresponse().status
        except (ssl.SSLError, ConnectionError):
            return 0
        finally:
            connection.close()

    return await asyncio.to_thread(ask)


@pytest.mark.parametrize("how", examples(["options", "variables", "named"], 1))
async def test_clients_with_a_token_get_in_by_both_doors(installation: Installation, how: str) -> None:
    options, variables = [], {}
    values = {
        "tls-cert": installation.own("named.crt" if how == "named" else "coordinator.crt"),
        "tls-key": installation.own("named.key" if how == "named" else "coordinator.key"),
        "tls-ca": installation.own("ca.crt"),
        "tokens": str(installation.tokens),
    }
    if how == "variables":
        variables = {f"SPECD_COORDINATOR_{name.replace('-', '_').upper()}": value for name, value in values.items()}
    else:
        options = [part for name, value in values.items() for part in (f"--{name}", value)]
    async with start_specd(*UP, *options, **variables) as up:
        address, port, command = await places(up)
        assert f"--address {address} --tls-ca {values['tls-ca']} --token TOKEN" in command
        host = "gpu.example.org" if how == "named" else "localhost"
        assert await status_of(installation, port, token=installation.token, host=host) == 200
        assert await status_of(installation, port, host=host) == 401
        name = ["--tls-name", "gpu.example.org"] if how == "named" else []
        arguments = ["generate", "def", "-n", "4", "--address", address, "--tls-ca", values["tls-ca"], *name]
        done = await asyncio.to_thread(run_specd, *arguments, "--token", installation.token)
        assert done.returncode == 0, done.stderr
        assert (await asyncio.to_thread(run_specd, *arguments)).returncode == 1


async def test_clients_with_a_certificate_get_in_by_both_doors(installation: Installation) -> None:
    gateway = {
        "SPECD_GATEWAY_COORDINATOR_CERT": installation.own("gateway.crt"),
        "SPECD_GATEWAY_COORDINATOR_KEY": installation.own("gateway.key"),
    }
    async with start_specd(*UP, *files_of(installation.certs, Role.COORDINATOR), **gateway) as up:
        address, port, _ = await places(up)
        assert await status_of(installation, port, role=Role.CLIENT) == 200
        assert await status_of(installation, port, role=Role.MONITORING) == 403
        assert await status_of(installation, port) == 0
        client = files_of(installation.certs, Role.CLIENT)
        done = await asyncio.to_thread(run_specd, "generate", "def", "-n", "4", "--address", address, *client)
        assert done.returncode == 0, done.stderr

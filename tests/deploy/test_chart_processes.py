"""The processes start with the arguments and variables of the chart, and its probes tell them apart."""

from __future__ import annotations

import asyncio
import json
import ssl
import urllib.error
import urllib.request
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest

from specd import AsyncClient
from specd.identity.tokens import new_token, write_tokens
from specd.rpc.credentials import PLAIN, ClientCredentials
from tests.deploy.chart import HELM, Object, render
from tests.deploy.pods import Machine, make_secrets
from tests.worker.families import save_family

PROMPT = "def fibonacci(n):"
SERVICE = "t-specd.models.svc"


def containers_of(name: str) -> dict[str, Object]:
    """Return the containers of a values file, by process."""
    return {container["args"][1]: container for container in _containers(render({}, HELM / "values" / f"{name}.yaml"))}


def _containers(made: list[Object]) -> list[Object]:
    """Return the containers of Deployments and LeaderWorkerSets; rank 0 comes before its followers."""
    pods = [each["spec"]["template"] for each in made if each["kind"] == "Deployment"]
    groups = [each["spec"]["leaderWorkerTemplate"] for each in made if each["kind"] == "LeaderWorkerSet"]
    pods += [group[f"{name}Template"] for group in groups for name in ("leader", "worker")]
    return [container for pod in pods for container in pod["spec"]["containers"]]


@pytest.mark.thorough
@pytest.mark.parametrize("values", ["lookup", "tls"])
async def test_a_token_comes_through_processes_of_the_chart(values: str, tmp_path: Path) -> None:
    machine, containers = Machine(tmp_path), containers_of(values)
    credentials, token = PLAIN, ""
    if values == "tls":
        make_secrets(tmp_path, [SERVICE])
        token, line = new_token("client")
        write_tokens(tmp_path / "tokens.jsonl", [line])
        credentials = ClientCredentials(tmp_path / "ca.crt", token=token, server_name=SERVICE)
    coordinator, gateway = containers["coordinator"], containers["gateway"]
    workers = [containers[name] for name in ("target-worker", "draft-worker") if name in containers]
    assert len(workers) == (2 if values == "tls" else 1)

    async with AsyncExitStack() as stack:
        for container in (coordinator, gateway):
            await stack.enter_async_context(machine.running(container))
            await machine.wait_for(container, "startup")
        # Without a target, nothing of this pod is restarted, and no client is sent to it.
        for container in (coordinator, gateway):
            assert await machine.probe(container, "liveness")
            assert not await machine.probe(container, "readiness")

        for container in workers:
            await stack.enter_async_context(machine.running(container))
        for container in workers:
            await machine.wait_for(container, "startup")
            assert await machine.probe(container, "liveness")
        for container in (*workers, coordinator, gateway):
            await machine.wait_for(container, "readiness")

        async with AsyncClient(f"dns:///localhost:{machine.port('50051')}", credentials=credentials) as client:
            completion = await client.generate(PROMPT, max_tokens=8).completion()
        assert completion.statistics.generated_tokens == 8

        ask = partial(complete, port=machine.port("8080"), ca=tmp_path / "ca.crt" if token else None, token=token)
        status, text = await asyncio.to_thread(ask, f"{SERVICE}:8080")
        assert (status, text) == (200, completion.text)
        # Over TLS, a name that a browser takes for another site's is in no certificate.
        status, _ = await asyncio.to_thread(ask, "evil.example.org")
        assert status == (200 if token else 403)


@pytest.mark.thorough
async def test_ranks_of_the_chart_hold_a_target_together(tmp_path: Path) -> None:
    model = save_family(tmp_path / "target", "llama", num_hidden_layers=4)
    own = {"model": model, "gpus": 0, "settings": {"ranks-backend": "ring"}}
    made = _containers(render({"targets": own, "drafts": {"enabled": False}}, HELM / "values" / "ranks.yaml"))
    machine = Machine(tmp_path)
    workers = [each for each in made if each["args"][1] == "target-worker"]
    (coordinator,) = [each for each in made if each["args"][1] == "coordinator"]
    assert len(workers) == 2
    async with AsyncExitStack() as stack:
        for container in (coordinator, *reversed(workers)):  # rank 0 is stopped first
            await stack.enter_async_context(machine.running(container))
        await machine.wait_for(workers[0], "startup")
        await machine.wait_for(coordinator, "readiness")
        async with AsyncClient(f"dns:///localhost:{machine.port('50051')}") as client:
            completion = await client.generate(PROMPT, max_tokens=8).completion()
        assert completion.statistics.generated_tokens == 8


def complete(host: str, port: int, ca: Path | None, token: str) -> tuple[int, str]:
    """Return the status and the text of a completion over HTTP, of a request to this host."""
    body = json.dumps({"model": "", "prompt": PROMPT, "max_tokens": 8, "temperature": 0})
    headers = {"host": host, "content-type": "application/json", "authorization": f"Bearer {token}"}
    url = f"{'https' if ca else 'http'}://127.0.0.1:{port}/v1/completions"
    asked = urllib.request.Request(url, body.encode(), headers)
    try:
        context = ssl.create_default_context(cafile=ca) if ca else None
        if context is not None:
            context.check_hostname = False  # of 127.0.0.1
        with urllib.request.urlopen(asked, timeout=60, context=context) as response:
            return response.status, json.load(response)["choices"][0]["text"]
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()

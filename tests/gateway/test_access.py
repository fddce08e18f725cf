"""Access: tokens and TLS on the way to the coordinator, and pages of other sites."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from openai import AsyncOpenAI, AuthenticationError, BadRequestError, InternalServerError

from specd.identity.roles import Role
from specd.supervisor import Stack
from tests.e2e.guarded import Guarded, guarded, make_certificates, workers_of, write_token
from tests.e2e.processes import PATIENCE_SECONDS, start_specd
from tests.security.http_door import HttpDoor

PROMPT = "def area(r):"


@pytest.fixture(scope="module")
async def installation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    """Processes with certificates, and a coordinator that takes tokens, one of which is in `tokens.jsonl`."""
    async with guarded(tmp_path_factory.mktemp("certs")) as running, AsyncExitStack() as stack:
        tokens = running.certs / "tokens.jsonl"
        (running.certs / "token").write_text(write_token(tokens, "alice", max_tokens=32))
        await running.start(
            stack, Role.COORDINATOR, *workers_of(running), "--tokens", str(tokens), name="coordinator with tokens"
        )
        yield running


@pytest.fixture(scope="module")
async def guarded_gateway(installation: Guarded) -> AsyncIterator[str]:
    """The address of a gateway in front of it, which trusts its authority and has no token of its own."""
    async with start_specd("gateway", *options_of(installation, installation.certs)) as running:
        yield (await running.next_event("ready"))["address"]


def options_of(installation: Guarded, trusted: Path) -> list[str]:
    coordinator = installation.address("coordinator with tokens")
    return ["--listen", "127.0.0.1:0", "--coordinator", coordinator, "--coordinator-ca", str(trusted / "ca.crt")]


def client_of(address: str, token: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://{address}/v1", api_key=token, max_retries=0)


async def test_a_token_goes_on_to_the_coordinator_over_tls(guarded_gateway: str, installation: Guarded) -> None:
    token = (installation.certs / "token").read_text()
    async with client_of(guarded_gateway, token) as client:
        (model,) = (await client.models.list()).data
        completion = await client.completions.create(model=model.id, prompt=PROMPT, max_tokens=8, temperature=0)
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 8
        # The limit of this token: the coordinator knows whose it is.
        with pytest.raises(BadRequestError, match="this client may generate at most 32"):
            await client.completions.create(model=model.id, prompt=PROMPT, max_tokens=33)


@pytest.mark.parametrize("token", ["none", "specd_" + "0" * 40])
async def test_without_the_token_nothing_is_told(guarded_gateway: str, token: str) -> None:
    async with client_of(guarded_gateway, token) as client:
        with pytest.raises(AuthenticationError) as refusal:
            await client.models.list()
        assert refusal.value.code == "token_unknown"
        with pytest.raises(AuthenticationError, match="the token is unknown"):
            await client.completions.create(model="", prompt=PROMPT)
    assert (await HttpDoor(guarded_gateway).get("/health")).status == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_a_token_can_be_a_key_of_anthropic(guarded_gateway: str, installation: Guarded, path: str) -> None:
    """This model has no chat template, which only a client with the token is told."""
    door, token = HttpDoor(guarded_gateway), (installation.certs / "token").read_text()
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}).encode()
    for header, status, kind in (
        (f"x-api-key: {token}", 400, "invalid_request_error"),
        (f"authorization: Bearer {token}", 400, "invalid_request_error"),
        (f"x-api-key: specd_{'0' * 40}", 401, "authentication_error"),
        ("x-other: x", 401, "authentication_error"),
    ):
        answer = await door.post(path, body, header)
        assert answer.status == status
        assert json.loads(answer.body)["error"]["type"] == kind


async def test_headers_that_grpc_has_no_room_for_are_a_401_or_nothing(
    guarded_gateway: str, installation: Guarded
) -> None:
    """gRPC calls both RESOURCE_EXHAUSTED, which would be a 429 with the time of the next try."""
    door, token = HttpDoor(guarded_gateway), (installation.certs / "token").read_text()
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
    for answer in (
        await door.post("/v1/completions", body, f"authorization: Bearer {'x' * 20_000}"),
        await door.get("/v1/models", f"authorization: Bearer {'x' * 20_000}"),
    ):
        assert answer.status == 401
        assert b"retry-after" not in answer.headers
    answer = await door.post("/v1/completions", body, f"authorization: Bearer {token}", f"traceparent: {'0' * 20_000}")
    assert answer.status == 200


async def test_a_request_that_is_too_long_for_the_coordinator_is_a_413(installation: Guarded) -> None:
    options = [*options_of(installation, installation.certs), "--max-body-bytes", "16MiB"]
    async with start_specd("gateway", *options) as running:
        door = HttpDoor((await running.next_event("ready"))["address"])
        token = (installation.certs / "token").read_text()
        body = json.dumps({"prompt": "x" * 5 * 2**20}).encode()
        answer = await door.post("/v1/completions", body, f"authorization: Bearer {token}")
    assert answer.status == 413
    assert b"retry-after" not in answer.headers
    assert json.loads(answer.body)["error"]["code"] == "body_too_large"


async def test_a_coordinator_of_another_authority_is_not_asked(installation: Guarded, tmp_path: Path) -> None:
    async with start_specd("gateway", *options_of(installation, make_certificates(tmp_path))) as running:
        address = (await running.next_event("ready"))["address"]
        async with client_of(address, (installation.certs / "token").read_text()) as client:
            with pytest.raises(InternalServerError) as refusal:
                await client.completions.create(model="", prompt=PROMPT)
        assert refusal.value.status_code == 503
        assert (await HttpDoor(address).get("/health")).status == 503


async def test_pages_of_an_allowed_origin_may_call() -> None:
    options = ("--listen", "127.0.0.1:0", "--coordinator", "127.0.0.1:1", "--cors-origins", "https://chat.example.org")
    async with start_specd("gateway", *options) as running:
        door = HttpDoor((await running.next_event("ready"))["address"])
        asking = ("access-control-request-method: POST", "access-control-request-headers: authorization, content-type")
        path, allowed = "/v1/chat/completions", b"access-control-allow-origin: https://chat.example.org"
        preflight = await door.request(door.head("OPTIONS", path, "origin: https://chat.example.org", *asking))
        assert preflight.status == 200
        assert allowed in preflight.headers
        answer = await door.post(path, b'{"messages": []}', "origin: https://chat.example.org")
        assert answer.status == 400
        assert allowed in answer.headers
        other = await door.request(door.head("OPTIONS", path, "origin: https://other.example.org", *asking))
        assert other.status == 403
        assert b"access-control-allow-origin" not in other.headers


@pytest.mark.thorough
async def test_a_stream_in_which_nothing_comes_has_a_ping_every_15_seconds(arranged_stack: Stack) -> None:
    """The target stands still from before the request on."""
    assert arranged_stack.gateway is not None
    door = HttpDoor(arranged_stack.gateway.facts["address"])
    body = json.dumps({"prompt": "<|say:hello|>", "temperature": 0, "stream": True}).encode()
    target = arranged_stack.target.process
    assert target is not None
    reader, writer = await door.connect()
    target.send_signal(signal.SIGSTOP)
    try:
        began_at = asyncio.get_running_loop().time()
        writer.write(door.head("POST", "/v1/completions", f"content-length: {len(body)}") + body)
        async with asyncio.timeout(PATIENCE_SECONDS):
            before = await reader.readuntil(b": ping\n\n")
        assert b"200 OK" in before
        assert b"data:" not in before
        assert asyncio.get_running_loop().time() - began_at >= 14.9
    finally:
        target.send_signal(signal.SIGCONT)
    async with asyncio.timeout(PATIENCE_SECONDS):
        rest = (await reader.read()).decode()
    writer.close()
    assert "[DONE]" in rest

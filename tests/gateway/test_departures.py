"""Clients that go away, coordinators that do, and errors in the middle of a stream."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from tests.e2e.faults import eventually
from tests.e2e.processes import PATIENCE_SECONDS, read_metric, start_specd, wait_until_idle
from tests.e2e.processes import eventually as poll
from tests.gateway.http_client import HttpClient
from tests.security.http_door import HttpDoor
from tests.worker.models import save_chat_target

LONG = {"prompt": "def f():", "max_tokens": 1900, "ignore_eos": True, "temperature": 0}


async def begin(http: HttpClient, *, stream: bool, **fields: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = http.address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({**LONG, "stream": stream, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {http.address}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


async def test_a_client_that_goes_away_ends_its_generation(stack: Stack, http: HttpClient) -> None:
    for stream in (True, False):
        before = read_metric(stack.coordinator, "specd_sessions_total", outcome="cancelled")
        reader, writer = await begin(http, stream=stream)
        if stream:
            assert b"200 OK" in await reader.readline()
        await poll(lambda: read_metric(stack.coordinator, "specd_active_sessions") == 1)
        writer.close()
        await wait_until_idle(stack)
        assert read_metric(stack.coordinator, "specd_sessions_total", outcome="cancelled") == before + 1
    assert (await http.get("/health")).status_code == 200


async def test_a_client_that_goes_away_during_its_upload_is_no_error() -> None:
    options = ("--listen", "127.0.0.1:0", "--coordinator", "127.0.0.1:1")
    async with start_specd("gateway", *options, SPECD_LOG_FORMAT="json") as running:
        door = HttpDoor((await running.next_event("ready"))["address"])
        _, writer = await door.connect()
        writer.write(door.head("POST", "/v1/completions", "content-length: 1000") + b'{"prompt": ')
        await writer.drain()

        async def has(sample: str) -> bool:
            return sample in (await door.get("/metrics")).body.decode()

        await eventually(lambda: has("specd_http_open_requests 1.0"))
        writer.close()
        await eventually(lambda: has("specd_http_open_requests 0.0"))
        assert await has('specd_http_requests_total{endpoint="completions",status="499"} 1.0')
    assert not [line for line in running.lines if "exception" in line]


def kill(stack: Stack) -> None:
    process = stack.coordinator.process
    assert process is not None
    process.send_signal(signal.SIGKILL)


@pytest.mark.thorough
async def test_what_was_begun_outlives_its_coordinator(tmp_path: Path) -> None:
    """Killed twice in each answer, the coordinator comes back, and the answers are those of an undisturbed run."""
    sampled = {"max_tokens": 160, "ignore_eos": True, "temperature": 0.8, "seed": 7, "repetition_penalty": 1.1}
    chat = {**sampled, "messages": [{"role": "user", "content": "def f():"}], "logprobs": True}
    completion = {**sampled, "prompt": "class Stack:", "logprobs": 2, "echo": True, "token_sources": True}
    async with (
        Stack(target=save_chat_target(tmp_path / "model"), draft=EMBEDDED_DRAFT, http="127.0.0.1:0") as stack,
        HttpClient(stack) as http,
        asyncio.timeout(PATIENCE_SECONDS),
    ):
        for path, body in (("/v1/chat/completions", chat), ("/v1/completions", completion)):
            alone = (await http.post(path, {**body, "draft_source": "none"})).json()["choices"][0]
            chunks = []
            async for chunk in http.incoming(path, body):
                chunks.append(chunk)
                if len(chunks) in {10, 25}:
                    kill(stack)
            choices = [chunk["choices"][0] for chunk in chunks]
            texts = [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices]
            assert "".join(texts) == (alone["text"] if "text" in alone else alone["message"]["content"])
            assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
            assert chunks[-1]["timings"]["predicted_n"] == 160
            shown = [choice["logprobs"] for choice in choices if choice["logprobs"]]
            name = "content" if path.startswith("/v1/chat") else "tokens"
            assert len([each for logprobs in shown for each in logprobs[name]]) == len(alone["logprobs"][name])

        before = read_metric(stack.coordinator, "specd_generated_tokens_total")
        whole = asyncio.ensure_future(http.post("/v1/completions", completion))
        await poll(lambda: read_metric(stack.coordinator, "specd_generated_tokens_total") > before + 40)
        kill(stack)
        assert (await whole).json()["choices"][0]["text"] == alone["text"]


@pytest.mark.thorough
async def test_a_kept_session_outlives_its_coordinator(tmp_path: Path) -> None:
    """Its coordinator is killed in the middle of a turn, and the answer and the session continue."""
    environment = {"SPECD_COORDINATOR_SESSION_FILE": str(tmp_path / "sessions")}
    turn = {**LONG, "max_tokens": 160, "ignore_eos": True, "temperature": 0.8, "seed": 7}
    async with (
        Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, http="127.0.0.1:0", environment=environment) as stack,
        HttpClient(stack) as http,
        asyncio.timeout(PATIENCE_SECONDS),
    ):
        first = {**turn, "max_tokens": 8}
        own = (await http.post("/v1/completions", first)).json()["session_id"]
        expected = [
            (await http.post("/v1/completions", {**turn, "session_id": own})).json()["choices"][0] for _ in range(2)
        ]
        session_id = (await http.post("/v1/completions", first)).json()["session_id"]
        for choice in expected:
            text, count = "", 0
            async for chunk in http.incoming("/v1/completions", {**turn, "session_id": session_id}):
                text, count = text + chunk["choices"][0]["text"], count + 1
                if count == 10:
                    kill(stack)
            assert text == choice["text"]


@pytest.mark.thorough
async def test_a_session_of_a_dead_coordinator_is_an_event_in_its_stream_and_a_503_after_it() -> None:
    """The gateway does not know the turns of a session, so it cannot restore it."""
    async with (
        Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, http="127.0.0.1:0") as stack,
        HttpClient(stack) as http,
    ):
        session_id = (await http.post("/v1/completions", {**LONG, "max_tokens": 2})).json()["session_id"]
        reader, writer = await begin(http, stream=True, session_id=session_id)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await reader.readuntil(b"data: ")
            kill(stack)
            rest = (await reader.read()).decode()
        writer.close()
        assert '"code":"session_not_found"' in rest
        assert "[DONE]" not in rest
        assert "127.0.0.1" not in rest

        kill(stack)
        statuses = set()

        async def is_back() -> bool:
            response = await http.post("/v1/completions", {**LONG, "max_tokens": 2})
            statuses.add(response.status_code)
            if response.status_code == 503:
                assert int(response.headers["retry-after"]) >= 1
            return response.status_code == 200

        await eventually(is_back, every_seconds=0.05)
        assert statuses <= {200, 503}

"""Clients that go away, coordinators that do, and errors in the middle of a stream."""

from __future__ import annotations

import asyncio
import json
import signal

from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from tests.e2e.faults import eventually
from tests.e2e.processes import PATIENCE_SECONDS, read_metric, start_specd, wait_until_idle
from tests.e2e.processes import eventually as poll
from tests.gateway.http_client import HttpClient
from tests.security.http_door import HttpDoor

LONG = {"prompt": "def f():", "max_tokens": 1900, "ignore_eos": True, "temperature": 0}


async def begin(http: HttpClient, *, stream: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = http.address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({**LONG, "stream": stream}).encode()
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


async def test_a_dead_coordinator_is_an_event_in_a_stream_and_a_503_after_it() -> None:
    async with (
        Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, http="127.0.0.1:0") as stack,
        HttpClient(stack) as http,
    ):
        reader, writer = await begin(http, stream=True)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await reader.readuntil(b"data: ")
            process = stack.coordinator.process
            assert process is not None
            process.send_signal(signal.SIGKILL)
            rest = (await reader.read()).decode()
        writer.close()
        assert '"type":"server_error"' in rest
        assert '"code":"unavailable"' in rest
        assert "[DONE]" not in rest
        assert "127.0.0.1" not in rest  # gRPC's own words name the address

        statuses = set()

        async def is_back() -> bool:
            response = await http.post("/v1/completions", {**LONG, "max_tokens": 2})
            statuses.add(response.status_code)
            if response.status_code == 503:
                assert int(response.headers["retry-after"]) >= 1
            return response.status_code == 200

        await eventually(is_back, every_seconds=0.05)
        assert statuses <= {200, 503}

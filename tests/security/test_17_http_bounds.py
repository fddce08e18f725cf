"""Check 17, at the HTTP door: bodies and fields are bounded, and slow clients do not hold it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

from tests.e2e.processes import PATIENCE_SECONDS
from tests.security.http_door import HttpDoor

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "x"}]
MIB = 2**20


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, {"messages": MESSAGES, "n": 9}, 400),
        (CHAT, {"messages": MESSAGES, "n": 2**31}, 400),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 21, "logprobs": True}, 400),
        (CHAT, {"messages": MESSAGES, "max_tokens": 2**40}, 400),
        (CHAT, {"messages": MESSAGES, "max_tokens": 0}, 400),
        (CHAT, {"messages": MESSAGES, "stop": ["x"] * 65}, 400),
        (CHAT, {"messages": MESSAGES, "logit_bias": {str(i): 1 for i in range(1025)}}, 400),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}] * 129}, 400),
        (CHAT, {"messages": MESSAGES * 4097}, 400),
        ("/v1/completions", {"prompt": ["x"] * 65}, 400),
        ("/v1/completions", {"prompt": "x", "n": 9}, 400),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_numbers_are_bounded(http_door: HttpDoor, path: str, body: dict[str, Any], status: int) -> None:
    """The coordinator is away, so that a request that is not refused before would be a 503."""
    assert (await http_door.post(path, json.dumps(body).encode())).status == status


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"messages": ' + b"[" * 100_000, 400),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, 400),
        (b'{"model": "a", "model": "b", "messages": []}', 400),
        (b"\xff\xfe", 400),
        (b'{"messages": NaN}', 400),
        (b" " * (4 * MIB + 1), 413),
    ],
    ids=["deep array", "deep object", "twice", "no text", "NaN", "long"],
)
async def test_bodies_are_bounded(http_door: HttpDoor, body: bytes, status: int) -> None:
    response = await http_door.post(CHAT, body)
    assert response.status == status
    assert json.loads(response.body)["error"]["message"]


async def test_a_body_in_chunks_without_end_is_refused_at_the_limit(http_door: HttpDoor) -> None:
    reader, writer = await http_door.connect()
    writer.write(http_door.head("POST", CHAT, "transfer-encoding: chunked"))
    sent = 0
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    answer = asyncio.ensure_future(reader.readline())
    # The answer can be lost, because a client that continues to send after a refusal is cut off.
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not answer.done() and sent < 64 * MIB:
                writer.write(chunk)
                await writer.drain()
                sent += 65536
                await asyncio.sleep(0)
            assert b" 413 " in await answer
    answer.cancel()
    assert sent < 16 * MIB
    writer.close()


async def test_a_length_that_lies_is_refused_before_the_body(http_door: HttpDoor) -> None:
    reader, writer = await http_door.connect()
    writer.write(http_door.head("POST", CHAT, "content-length: 100000000"))
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert b" 413 " in await reader.readline()
    writer.close()


async def test_headers_that_do_not_end_are_cut_off(http_door: HttpDoor) -> None:
    """A slowloris: a byte now and then, for ever."""
    reader, writer = await http_door.connect()
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n")
    closed = asyncio.ensure_future(reader.read())
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not closed.done():
            try:
                writer.write(b"x-a: b\r\n")
                await writer.drain()
            except ConnectionError:
                break
            await asyncio.wait({closed}, timeout=0.5)
    assert not closed.cancelled()
    assert (await closed) == b""
    writer.close()


async def test_headers_are_bounded(http_door: HttpDoor) -> None:
    response = await http_door.request(
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-a: " + b"a" * 2 * MIB + b"\r\n\r\n"
    )
    assert response.status == 400

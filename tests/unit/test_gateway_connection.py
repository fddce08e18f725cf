"""Connections of the gateway's clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import h11
import pytest
import uvicorn

from gateway.http.connection import PIECE_BYTES, BoundedConnection
from gateway.main import _Server
from specd.listening import listen


@asynccontextmanager
async def echoing() -> AsyncIterator[int]:
    """Serve an application that answers how long each body is; yield its port."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        length, has_more = 0, True
        while has_more:
            message = await receive()
            length, has_more = length + len(message.get("body", b"")), message.get("more_body", False)
        body = str(length).encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    listener = listen("127.0.0.1:0")
    server = _Server(uvicorn.Config(app, http=BoundedConnection, ws="none", lifespan="off", log_config=None))
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving
        listener.close()


async def answers_to(port: int, content: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(content)
    answer = await reader.read()
    writer.close()
    return answer


def chunked(chunk: bytes, count: int, *headers: str) -> bytes:
    head = "\r\n".join(["POST / HTTP/1.1", "host: localhost", "transfer-encoding: chunked", *headers, "", ""])
    return head.encode() + (f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n") * count + b"0\r\n\r\n"


async def test_other_connections_have_turns_between_many_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    num_events = most = 0
    original = h11.Connection.next_event

    def counted(connection: h11.Connection) -> Any:
        nonlocal num_events
        num_events += 1
        return original(connection)

    monkeypatch.setattr(h11.Connection, "next_event", counted)
    async with echoing() as port:
        asking = asyncio.ensure_future(answers_to(port, chunked(b"x", 50_000, "connection: close")))
        while not asking.done():
            before = num_events
            await asyncio.sleep(0)
            most = max(most, num_events - before)
        assert (await asking).endswith(b"\r\n50000")
    assert num_events > 50_000
    assert most < PIECE_BYTES  # of one turn of the loop


@pytest.mark.parametrize("length", [1, 700, PIECE_BYTES, 5 * PIECE_BYTES + 1, 300_000])
async def test_requests_in_many_pieces_are_read_in_order(length: int) -> None:
    many = chunked(b"x" * length, 3) * 4 + chunked(b"x" * length, 3, "connection: close")
    async with echoing() as port:
        answer = await answers_to(port, many)
    assert answer.count(b"HTTP/1.1 200 OK") == 5
    assert answer.count(f"\r\n\r\n{3 * length}".encode()) == 5

"""Server-sent events, as OpenAI's and Anthropic's clients read them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from pydantic_core import to_json
from starlette.types import Send

from gateway.http.errors import ApiError
from gateway.http.notice import Notice

PING_SECONDS = 15.0
NOTICE_SECONDS = 2.0

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # a proxy must not collect them
}


def data(value: Mapping[str, Any]) -> bytes:
    """Return an event without a name."""
    return b"data: " + to_json(value) + b"\n\n"


def named(value: Mapping[str, Any]) -> bytes:
    """Return an event with its `type` as its name, like the events of /v1/responses and /v1/messages."""
    return f"event: {value['type']}\n".encode() + data(value)


DONE = b"data: [DONE]\n\n"


async def send_events(
    events: AsyncIterator[bytes],
    send: Send,
    headers: Callable[[], Mapping[str, str]],
    event_of: Callable[[ApiError], bytes],
    notice: Notice,
    *,
    ping_seconds: float = PING_SECONDS,
    notice_seconds: float = NOTICE_SECONDS,
) -> None:
    """Send events as they come, and a comment after each `ping_seconds` without an event.

    While `notice` has a text, the comment is that text, at once when it changes and after each `notice_seconds`.

    An ApiError before the first event is raised, so that it becomes a response of its own, unless a comment was sent
    before. A later ApiError becomes the last event, by `event_of`. `headers` is called when the response begins.
    """
    stream = _Stream(send, headers)
    pinging = asyncio.ensure_future(stream.ping(notice, ping_seconds, notice_seconds))
    try:
        async for event in events:
            await stream.write(event)
    except ApiError as error:
        if not stream.began:
            raise
        await stream.write(event_of(error))
    finally:
        pinging.cancel()
    await stream.end()


class _Stream:
    """The running response."""

    def __init__(self, send: Send, headers: Callable[[], Mapping[str, str]]) -> None:
        self._send = send
        self._headers = headers
        self._written_at = time.monotonic()
        self.began = False

    async def write(self, chunk: bytes) -> None:
        await self._begin()
        self._written_at = time.monotonic()
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def ping(self, notice: Notice, seconds: float, notice_seconds: float) -> None:
        while True:
            period = notice_seconds if notice.text else seconds
            is_new = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(self._written_at + period - time.monotonic(), 0.001)):
                    await notice.changed()
                    is_new = bool(notice.text)
            if is_new or time.monotonic() >= self._written_at + period:
                await self.write(f": {notice.text or 'ping'}\n\n".encode())

    async def end(self) -> None:
        await self._begin()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self) -> None:
        if not self.began:
            self.began = True
            raw = [(name.encode(), text.encode()) for name, text in {**_HEADERS, **self._headers()}.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": raw})

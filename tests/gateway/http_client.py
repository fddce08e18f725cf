"""A client of the gateway that sees every header and every byte."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import httpx2

from specd.supervisor import Stack


class HttpClient:
    """Client of the gateway of a stack, as an async context manager."""

    def __init__(self, stack: Stack) -> None:
        assert stack.gateway is not None
        self.address = stack.gateway.facts["address"]
        self._client = httpx2.AsyncClient(base_url=f"http://{self.address}", timeout=60)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def get(self, path: str, **headers: str) -> httpx2.Response:
        return await self._client.get(path, headers=_dashed(headers))

    async def post(self, path: str, body: Any, **headers: str) -> httpx2.Response:
        """Send a JSON value, or bytes as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self._client.post(
            path, content=content, headers={"content-type": "application/json", **_dashed(headers)}
        )

    async def events(self, path: str, body: dict[str, Any]) -> list[str]:
        """Return the data of the events of a stream, in order."""
        response = await self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = response.text.removesuffix("\n\n").split("\n\n")
        return [line.removeprefix("data: ") for block in blocks for line in block.split("\n") if line[:5] == "data:"]

    async def incoming(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of a stream as they come, up to [DONE], which has to come."""
        request = self._client.stream("POST", path, json={**body, "stream": True})
        async with request as response:
            assert response.status_code == 200, (await response.aread()).decode()
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))
        raise AssertionError("the stream ended without [DONE]")

    async def stream_headers(self, path: str, body: dict[str, Any]) -> httpx2.Headers:
        """Return the headers of a stream."""
        return (await self.post(path, {**body, "stream": True})).headers

    async def chunks(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the chunks of a stream that ends as it should: `[DONE]` is no event of responses, as at OpenAI."""
        chunks = await self.events(path, body)
        if not path.endswith("/responses"):
            assert chunks.pop() == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]


def _dashed(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}

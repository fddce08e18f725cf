"""A client of the gateway that can break the rules of HTTP."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

from tests.e2e.processes import PATIENCE_SECONDS


@dataclass(frozen=True)
class HttpAnswer:
    """The whole answer."""

    status: int
    headers: bytes
    body: bytes


class HttpDoor:
    """The address of a gateway, with a connection for each request."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self.address.rsplit(":", 1)
        return await asyncio.open_connection(host, int(port))

    def head(self, method: str, path: str, *headers: str) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"host: {self.address}", "connection: close", *headers]
        return "\r\n".join([*lines, "", ""]).encode()

    async def post(self, path: str, body: bytes, *headers: str) -> HttpAnswer:
        return await self.request(self.head("POST", path, f"content-length: {len(body)}", *headers) + body)

    async def get(self, path: str, *headers: str) -> HttpAnswer:
        return await self.request(self.head("GET", path, *headers))

    async def request(self, content: bytes) -> HttpAnswer:
        """Send bytes as they are, and return what comes until the end."""
        reader, writer = await self.connect()
        answer = b""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                writer.write(content)
                while part := await reader.read(65536):
                    answer += part
        except ConnectionError:
            pass  # a refusal does not wait for the rest of the request
        finally:
            writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        return HttpAnswer(int(head.split(b" ", 2)[1]), head.lower(), body)


async def pipelined(address: str, requests: Sequence[tuple[str, str]], trusting: ssl.SSLContext) -> list[int]:
    """Send GET requests at once over one TLS connection, each a path and a further header; return their statuses."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port), ssl=trusting, server_hostname="localhost")
    for path, header in requests:
        lines = [f"GET {path} HTTP/1.1", "host: localhost", header or "accept: */*"]
        writer.write("\r\n".join([*lines, "", ""]).encode())
    statuses = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        for _ in requests:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            statuses.append(int(head.split(b" ", 2)[1]))
            await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
    writer.close()
    return statuses

"""Connections that do not wait for slow clients, and that give each request the roles of their client."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from specd.identity.roles import Role, roles_in

# In the scope of a request: the roles in the certificate of the connection's client; missing without a certificate.
ROLES = "specd.roles"

# The time for the headers of the first request, for which uvicorn itself waits without limit.
HEADER_SECONDS = 10.0

# Read at a time: 256 KiB, which asyncio brings at once, can be 43,000 chunks of a byte, each of 40 µs in the parser.
PIECE_BYTES = 4096


class BoundedConnection(H11Protocol):
    """uvicorn's connection, closed if its first request does not come in time.

    For later requests uvicorn's `timeout_keep_alive` is the limit, until their first byte.
    """

    _deadline: asyncio.TimerHandle | None = None
    _unread: bytearray

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the headers."""
        super().connection_made(transport)
        self._unread = bytearray()
        if peer := transport.get_extra_info("peercert"):  # TLS has verified it
            roles = roles_in(name for kind, name in peer.get("subjectAltName", ()) if kind == "DNS")
            self.app = _with_roles(self.app, roles)  # for pipelined requests too
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        """Read bytes a piece at a time, so that other connections have their turns between two pieces."""
        is_waiting = bool(self._unread)
        self._unread += data
        if not is_waiting:
            self._read_piece()

    def _read_piece(self) -> None:
        if self.transport.is_closing():
            self._unread.clear()
            return
        piece = bytes(self._unread[:PIECE_BYTES])
        del self._unread[:PIECE_BYTES]
        self._read(piece)
        if self._unread:
            self.transport.pause_reading()
            self.loop.call_soon(self._read_piece)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def _read(self, data: bytes) -> None:
        """Read bytes, and stop the timer once the headers are whole."""
        before = self.scope
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._wait_for_headers()
        super().data_received(data)
        if self.scope is not before:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_headers(self) -> None:
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> Any:
        self._deadline = None
        self.transport.close()


def _with_roles(app: ASGIApp, roles: frozenset[Role]) -> ASGIApp:
    """Return an application that gives these roles to all its requests."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, ROLES: roles}, receive, send)

    return served

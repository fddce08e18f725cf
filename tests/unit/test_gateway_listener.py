"""The socket that the gateway listens on."""

from __future__ import annotations

import asyncio
import socket

from specd.listening import listen


async def test_events_do_not_wait_for_a_fuller_packet() -> None:
    """Nagle's algorithm would hold each event back until the one before is acknowledged, 40 ms later."""
    has_no_delay: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        has_no_delay.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = listen("127.0.0.1:0")
    async with await asyncio.start_server(accept, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await has_no_delay
        writer.close()

"""A way to a server that can be long, cut or dead: a proxy between two Unix sockets, or two ports."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

_CHUNK_BYTES = 1 << 16
_ATTEMPTS, _RETRY_SECONDS = 500, 0.02


class Wire:
    """An async context manager that listens on one Unix socket or HOST:PORT, and connects to another.

    Each piece of data is forwarded `delay_seconds` after its arrival, in order, with no limit to the data in between.
    While the wire is held nothing is forwarded, and neither end is told, as on half-open connections.
    """

    def __init__(self, listen: str, connect: str, delay_seconds: float = 0.0) -> None:
        """Take the paths of the sockets, or HOST:PORT; with port 0, `port` is the one to connect to."""
        self.delay_seconds = delay_seconds
        self._listen = listen
        self._connect = connect
        self._server: asyncio.Server | None = None
        self.port = 0
        self.waits = False  # for a server that is not there yet, because its clients try once
        self._connections: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()

    async def __aenter__(self) -> Wire:
        if self._listen.startswith("/"):
            self._server = await asyncio.start_unix_server(self._accept, self._listen)
        else:
            host, _, port = self._listen.rpartition(":")
            self._server = await asyncio.start_server(self._accept, host, int(port))
            self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut()

    async def cut(self) -> None:
        """End all connections; new ones can be made."""
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def hold(self, seconds: float) -> None:
        """Let nothing through for a while."""
        self._flows.clear()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._flows.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.ensure_future(self._serve(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await self._reach()
        except OSError:  # the server is not there yet, and the caller will try again
            writer.close()
            return
        try:
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._pass_on(reader, far_writer))
                ways.create_task(self._pass_on(far_reader, writer))
        except* OSError:  # one end is gone, and so is the connection
            pass
        finally:
            writer.close()
            far_writer.close()

    async def _reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the server. Raises OSError if it is not there, with `waits` only after many attempts."""
        for _ in range(_ATTEMPTS if self.waits else 0):
            with contextlib.suppress(OSError):
                return await self._connected()
            await asyncio.sleep(_RETRY_SECONDS)
        return await self._connected()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._connect.startswith("/"):
            return await asyncio.open_unix_connection(self._connect)
        host, _, port = self._connect.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what one end says, until it has nothing more to say."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sending = asyncio.ensure_future(self._send(under_way, writer))
        loop = asyncio.get_running_loop()
        try:
            data = b"nothing yet"
            while data:
                data = await reader.read(_CHUNK_BYTES)
                under_way.put_nowait((loop.time() + self.delay_seconds, data))
            await sending
        finally:
            sending.cancel()

    async def _send(self, under_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_at, data = await under_way.get()
            await asyncio.sleep(due_at - loop.time())
            await self._flows.wait()
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()

"""HTTP/2 connections that keep to the rules, by `h2`, and that break them, by frames made by hand."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, ResponseReceived, StreamEnded, StreamReset, TrailersReceived
from h2.settings import SettingCodes, Settings
from hpack import Encoder
from hyperframe.frame import Frame, HeadersFrame

Headers = Iterable[tuple[str, str]]

_READ_BYTES = 2**16


def call_headers(path: str, metadata: Headers = ()) -> list[tuple[str, str]]:
    """Return the headers of a gRPC call."""
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *metadata,
    ]


def with_length(message: bytes) -> bytes:
    """Return a message as gRPC puts it into DATA frames."""
    return struct.pack(">BI", 0, len(message)) + message


def encoded(headers: Headers) -> bytes:
    """Return a block of headers that neither needs nor changes the table of a connection."""
    literals = [(name, value, True) for name, value in headers]  # True: never to be indexed
    return Encoder().encode(literals, huffman=False)  # a Huffman code of much takes minutes


def headers_frame(stream_id: int, block: bytes, *flags: str) -> HeadersFrame:
    """Return a HEADERS frame; END_HEADERS and END_STREAM are flags like any other."""
    return HeadersFrame(stream_id, block, flags=flags)


class Connection:
    """A connection to a gRPC server.

    `h2` keeps its state and makes legal frames, which `flush` sends; `send_frames` bypasses it.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.h2 = H2Connection(H2Configuration(client_side=True, validate_outbound_headers=False))

    @classmethod
    async def open(cls, address: str, *, window: int = 2**16 - 1) -> Connection:
        """Connect to HOST:PORT or unix:PATH, and shake hands. A server may send `window` bytes on each stream."""
        connection = cls(*await connect(address))
        settings = {SettingCodes.INITIAL_WINDOW_SIZE: window, SettingCodes.ENABLE_PUSH: 0}
        connection.h2.local_settings = Settings(client=True, initial_values=settings)
        connection.h2.initiate_connection()
        await connection.flush()
        return connection

    def begin(self, path: str, message: bytes | None = None, *, metadata: Headers = (), end: bool = True) -> int:
        """Begin a call, with its first message; return the id of its stream."""
        stream_id = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream_id, call_headers(path, metadata), end_stream=message is None and end)
        if message is not None:
            self.h2.send_data(stream_id, with_length(message), end_stream=end)
        return stream_id

    async def flush(self) -> None:
        """Send what `h2` has to send."""
        self.writer.write(self.h2.data_to_send())
        await self.writer.drain()

    async def send_frames(self, *frames: Frame) -> None:
        """Send frames as they are."""
        self.writer.write(b"".join(frame.serialize() for frame in frames))
        await self.writer.drain()

    async def receive(self) -> list[Event]:
        """Return what has come, and send what `h2` answers. Raises ConnectionError when the server has closed."""
        data = await self.reader.read(_READ_BYTES)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        events = self.h2.receive_data(data)
        await self.flush()
        return events

    async def status_of(self, stream_id: int) -> str:
        """Read until a call ends; return its grpc-status, or what else ended it. Data is acknowledged as it comes."""
        while True:
            for event in await self.receive():
                if getattr(event, "stream_id", None) != stream_id:
                    continue
                if isinstance(event, DataReceived):
                    assert event.flow_controlled_length is not None
                    self.h2.acknowledge_received_data(event.flow_controlled_length, stream_id)
                elif isinstance(event, (ResponseReceived, TrailersReceived)):
                    headers = {_text(name): _text(value) for name, value in event.headers or ()}
                    if "grpc-status" in headers:
                        return headers["grpc-status"]
                    if headers.get(":status", "200") != "200":
                        return f"HTTP {headers[':status']}"
                elif isinstance(event, StreamReset):
                    return f"RST_STREAM {event.error_code!r}"
                elif isinstance(event, StreamEnded):
                    return "ended without a status"
            await self.flush()

    def close(self) -> None:
        """Close the socket, without a word."""
        self.writer.transport.abort()


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a socket to HOST:PORT or unix:PATH, on which nothing was sent."""
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(address.removeprefix("unix:"))
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host.strip("[]"), int(port))


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value

"""The connection between rank 0 and a follower: messages with their lengths, over TCP, TLS or a Unix socket."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from google.protobuf.message import DecodeError

from specd.v1.ranks_pb2 import Beat, RankMessage

_LENGTH = struct.Struct("!I")
_MOST_BYTES = 64 * 2**20
# Before a peer is welcome, it may not send more than a few names.
_MOST_BYTES_OF_STRANGERS = 64 * 2**10
_CHUNK_BYTES = 2**16


class LostRankError(Exception):
    """The connection to another rank has ended."""


class RankConnection:
    """A connection to another rank. A thread reads it, so that its end is seen at once, also within a collective.

    TLS is not safe for a reader and a writer at the same time. So the socket never blocks while the lock is held.
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        """Use a connected socket; `peer` names the other end for people."""
        sock.setblocking(False)
        self.peer = peer
        self.beat = Beat()  # the latest
        self.silent_seconds = 0.0  # a watch counts them, and each message sets them to 0
        self.is_welcome = False
        self._socket = sock
        self._own_address, self._peer_address = sock.getsockname(), sock.getpeername()
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._received: SimpleQueue[RankMessage | None] = SimpleQueue()
        self._lost = ""
        self._on_lost: Callable[[str], None] | None = None
        threading.Thread(target=self._read, name=f"reads {peer}", daemon=True).start()

    @property
    def lost(self) -> str:
        """The reason why the connection has ended, or "" if it has not."""
        return self._lost

    @property
    def own_host(self) -> str:
        """The host of this end."""
        return self._host_of(self._own_address)

    @property
    def peer_host(self) -> str:
        """The host of the other end, as this one sees it."""
        return self._host_of(self._peer_address)

    @staticmethod
    def _host_of(address: Any) -> str:
        return str(address[0]) if isinstance(address, tuple) else "127.0.0.1"  # a Unix socket is on this machine

    def when_lost(self, act: Callable[[str], None]) -> None:
        """Call `act` with the reason as soon as the connection ends, from another thread, or now if it has ended."""
        self._on_lost = act
        if self._lost:
            act(self._lost)

    def send(self, message: RankMessage) -> None:
        """Send a message. Raises LostRankError."""
        data = message.SerializeToString()
        left = memoryview(_LENGTH.pack(len(data)) + data)
        with self._sending:
            while left:
                try:
                    with self._lock:
                        num_sent = self._socket.send(left)
                    left = left[num_sent:]
                except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                    select.select([], [self._socket], [], 0.1)
                except (OSError, ValueError) as error:
                    raise LostRankError(f"cannot send to {self.peer}: {error}") from error

    def receive(self, timeout: float | None = None) -> RankMessage:
        """Return the next message that is not a beat. Raises LostRankError, or TimeoutError after `timeout` seconds."""
        try:
            message = self._received.get(timeout=timeout)
        except Empty:
            raise TimeoutError(f"{self.peer} has sent nothing for {timeout} s") from None
        if message is None:
            self._received.put(None)  # for the next call
            raise LostRankError(self._lost)
        return message

    def close(self) -> None:
        """End the connection, without a call of the function for its end."""
        self._on_lost = None
        with self._lock:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _read(self) -> None:
        reason = f"{self.peer} has closed the connection"
        try:
            while True:
                (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
                if length > (_MOST_BYTES if self.is_welcome else _MOST_BYTES_OF_STRANGERS):
                    reason = f"{self.peer} has sent a message of {length} bytes"
                    break
                message = RankMessage.FromString(self._exactly(length))
                self.silent_seconds = 0.0
                kind = message.WhichOneof("kind")
                if kind == "beat":
                    self.beat = message.beat
                    continue
                if kind == "goodbye":
                    self._on_lost = None  # the other rank stops on purpose
                self._received.put(message)
        except EOFError:
            pass
        except DecodeError:
            reason = f"{self.peer} has sent what is no message"
        except (OSError, ValueError) as error:
            reason = f"the connection to {self.peer} broke: {error}"
        with self._lock:
            self._socket.close()
        self._lost = reason
        self._received.put(None)
        if self._on_lost is not None:
            self._on_lost(reason)

    def _exactly(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            try:
                with self._lock:
                    part = self._socket.recv(min(num_bytes - len(data), _CHUNK_BYTES))
                if not part:
                    raise EOFError
                data += part
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                select.select([self._socket], [], [])
        return bytes(data)

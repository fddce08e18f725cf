"""Limits of a server's connections, calls and messages: gRPC's options, and checks that gRPC does not make."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Any

import grpc

from specd.errors import ResourceExhaustedError

# HTTP/2 counts 32 bytes for each entry in addition to its name and value.
MAX_METADATA_BYTES = 16 * 1024
_ENTRY_BYTES = 32

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

# gRPC refuses a large message without a reason that a program could read. So gRPC accepts this many times specd's
# limit, and specd refuses the sizes between the two. gRPC's limit bounds the memory of a call: 32 KiB before its caller
# is known, and twice the largest request afterwards.
_TAKEN_IN = 2

# Requests of these methods can be as long as the server's limit; other requests are a few names and numbers.
_LONG = frozenset({"Generate", "CountTokens", "Detokenize", "Propose", "Verify", "Multiplex"})
MAX_SHORT_BYTES = 64 * 1024

# Calls at a time on one connection, unless a server needs another number. A coordinator has one connection to a worker
# for all sessions.
MAX_STREAMS = 1024

# Half of the files that a process may open are left for the process itself.
_MOST_CONNECTIONS = 1024


def most_connections() -> int:
    """Return how many connections a server accepts at a time; gRPC closes others."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(_MOST_CONNECTIONS, soft // 2)


@dataclass(frozen=True)
class ConnectionAge:
    """The age at which a connection stops accepting calls, and the time that its calls then have; 0 is no limit.

    The client opens another connection, to the address that its name has now. So a lost certificate or an old address
    does not work for ever. Calls beyond the grace end with UNAVAILABLE. Connections between coordinator and workers
    have no such age, because their streams are sessions.
    """

    seconds: float
    grace_seconds: float

    @property
    def options(self) -> list[tuple[str, int]]:
        """Options of a server."""
        given = {"age": self.seconds, "age_grace": self.grace_seconds}
        return [(f"grpc.max_connection_{name}_ms", round(1000 * value)) for name, value in given.items() if value]


def connection_options(max_streams: int, max_message_bytes: int) -> list[tuple[str, int]]:
    """Return options that bound the cost of connections, each with up to `max_streams` calls at a time.

    `max_message_bytes` is the largest request that specd accepts; gRPC's own bounds are higher.
    """
    return [
        ("grpc.max_receive_message_length", _TAKEN_IN * max_message_bytes),
        # Rapid reset (CVE-2023-44487): a cancelled call counts until its handler has ended.
        ("grpc.max_concurrent_streams", max_streams),
        # Equal limits, because between the two gRPC refuses some calls.
        ("grpc.max_metadata_size", _TAKEN_IN * MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _TAKEN_IN * MAX_METADATA_BYTES),
        ("grpc.max_allowed_incoming_connections", most_connections()),
        # Bounds for connections that send nothing, that ignore these limits, and that are idle.
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.http2.settings_timeout", 5_000),
        ("grpc.max_connection_idle_ms", 300_000),
        # A client may ping often, and without calls, to notice a lost host: see specd/rpc/channel.py. One that pings
        # more often than this, for the third time, is disconnected.
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def check_length(method: str, data: bytes, max_message_bytes: int) -> None:
    """Raise ResourceExhaustedError for a request that is longer than its method allows."""
    most = max_message_bytes if method.rpartition("/")[2] in _LONG else min(MAX_SHORT_BYTES, max_message_bytes)
    if len(data) > most:
        raise ResourceExhaustedError(
            "MESSAGE_TOO_LARGE", f"the request to {method} has {len(data)} bytes: send at most {most}"
        )


def check_metadata(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Raise ResourceExhaustedError for too much metadata.

    gRPC's core enforces its limit only once a client has acknowledged it: one that never does could send 16 MiB a call.
    """
    size = sum(len(name) + len(value) + _ENTRY_BYTES for name, value in context.invocation_metadata() or ())
    if size > MAX_METADATA_BYTES:
        raise ResourceExhaustedError(
            "METADATA_TOO_LARGE", f"the metadata takes {size} bytes: send at most {MAX_METADATA_BYTES}"
        )

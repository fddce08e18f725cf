"""What a server takes from one connection and from all of them: options of gRPC, and what gRPC itself lets pass."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Any

import grpc

from specd.errors import ResourceExhaustedError

# By the rule of HTTP/2: 32 bytes for each entry besides its name and value.
MAX_METADATA_BYTES = 16 * 1024
_ENTRY_BYTES = 32

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

# gRPC refuses what is too large without a reason that a program could read. So it takes in this many times as much, and
# specd refuses what is between; more stays gRPC's to refuse, or a call's memory would have no bound.
_TAKEN_IN = 2

# Requests of these methods can be long, up to what the server takes; those of the others are a few names and numbers.
_LONG = frozenset({"Generate", "CountTokens", "Propose", "Verify"})
MAX_SHORT_BYTES = 64 * 1024

# Calls at a time on one connection, unless a server needs another number. A coordinator has all sessions on one.
MAX_STREAMS = 1024

# Of connections, as far as the process may open so many files: half of them are left for itself.
_MOST_CONNECTIONS = 1024


def most_connections() -> int:
    """Return how many connections a server accepts at a time; gRPC closes others."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(_MOST_CONNECTIONS, soft // 2)


@dataclass(frozen=True)
class ConnectionAge:
    """How long a connection takes new calls, and how long those that it has may then go on; 0 is without end.

    Its client opens another one, where names and load balancers send it now. Calls beyond the grace end with
    UNAVAILABLE.
    """

    seconds: float
    grace_seconds: float

    @property
    def options(self) -> list[tuple[str, int]]:
        """Options of a server."""
        given = {"age": self.seconds, "age_grace": self.grace_seconds}
        return [(f"grpc.max_connection_{name}_ms", round(1000 * value)) for name, value in given.items() if value]


def connection_options(max_streams: int, max_message_bytes: int) -> list[tuple[str, int]]:
    """Return options that bound what connections cost: each has up to `max_streams` calls at a time.

    `max_message_bytes` is the largest request that specd takes; gRPC's own bounds are above specd's.
    """
    return [
        ("grpc.max_receive_message_length", _TAKEN_IN * max_message_bytes),
        # Rapid reset (CVE-2023-44487): a cancelled call counts until its handler has ended.
        ("grpc.max_concurrent_streams", max_streams),
        ("grpc.max_metadata_size", _TAKEN_IN * MAX_METADATA_BYTES),  # between the two, gRPC would refuse some
        ("grpc.absolute_max_metadata_size", _TAKEN_IN * MAX_METADATA_BYTES),
        ("grpc.max_allowed_incoming_connections", most_connections()),
        # Connections that say nothing, that take no notice of these limits, and that nobody uses.
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
    """Raise ResourceExhaustedError for a request that is longer than those of its method can be."""
    most = max_message_bytes if method.rpartition("/")[2] in _LONG else min(MAX_SHORT_BYTES, max_message_bytes)
    if len(data) > most:
        raise ResourceExhaustedError(
            "MESSAGE_TOO_LARGE", f"the request to {method} has {len(data)} bytes: the most is {most}, so send less"
        )


def check_metadata(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Raise ResourceExhaustedError for too much metadata.

    gRPC's core keeps the limit from when a client has acknowledged it: one that never does could send 16 MiB a call.
    """
    size = sum(len(name) + len(value) + _ENTRY_BYTES for name, value in context.invocation_metadata() or ())
    if size > MAX_METADATA_BYTES:
        raise ResourceExhaustedError(
            "METADATA_TOO_LARGE", f"the metadata takes {size} bytes: the most is {MAX_METADATA_BYTES}, so send less"
        )

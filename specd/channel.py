"""How specd's processes and clients open gRPC channels."""

from __future__ import annotations

import grpc

from specd.server import MAX_MESSAGE_BYTES

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer that hangs, or a host that is gone, is noticed after seconds and not after a minute.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    # A worker that restarts is found again within a few hundred milliseconds.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # in effect the time that a connection may take
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),
]


def open_channel(address: str) -> grpc.aio.Channel:
    """Open a channel to HOST:PORT or unix:PATH; it connects, and reconnects, by itself."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)

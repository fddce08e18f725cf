"""gRPC channels."""

from __future__ import annotations

import grpc

from specd.rpc.credentials import PLAIN, ClientCredentials
from specd.rpc.limits import MAX_MESSAGE_BYTES

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Notice a hung peer or a lost host after seconds, not after a minute.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    # Reconnect to a restarted worker within a few hundred milliseconds.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # in effect the timeout of a connection attempt
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),
]


def open_channel(address: str, credentials: ClientCredentials = PLAIN) -> grpc.aio.Channel:
    """Return a channel to HOST:PORT or unix:PATH. It connects and reconnects by itself.

    Raises StartupError for credentials that cannot be used.
    """
    options, interceptors = [*_OPTIONS, *credentials.options], credentials.interceptors
    if (tls := credentials.for_channel(address)) is None:
        return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
    return grpc.aio.secure_channel(address, tls, options=options, interceptors=interceptors)


def open_blocking_channel(address: str, credentials: ClientCredentials = PLAIN) -> grpc.Channel:
    """Return the same for threads. The token does not go by itself: pass `credentials.metadata` with each call."""
    options = [*_OPTIONS, *credentials.options]
    if (tls := credentials.for_channel(address)) is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls, options=options)

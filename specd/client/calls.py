"""Calls in threads. `async_calls` has the same for event loops: the clients differ in these alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc

from specd.client.protocol.errors import client_closed, error_from
from specd.client.resuming.generation import Connection
from specd.rpc.channel import open_blocking_channel as open_channel
from specd.rpc.credentials import ClientCredentials

__all__ = ["failures", "open_channel", "sleep", "token_metadata"]

sleep = time.sleep


def token_metadata(credentials: ClientCredentials) -> Sequence[tuple[str, str]]:
    """Return the metadata that a call must carry for the client's token."""
    return credentials.metadata


@contextmanager
def failures(address: str, connection: Connection) -> Iterator[None]:
    """Raise a SpecdError for an error of gRPC's in the block, CallError (CLIENT_CLOSED) where the client was closed."""
    try:
        yield
    except (grpc.RpcError, ValueError) as error:
        if connection.is_closed:  # by another thread; gRPC then raises either
            raise client_closed() from error
        if isinstance(error, grpc.RpcError):
            raise error_from(error, address) from error
        raise

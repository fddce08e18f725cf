"""Calls in an event loop. `calls` has the same for threads: the clients differ in these alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc

from specd.client.protocol.errors import client_closed, error_from
from specd.client.resuming.generation import Connection
from specd.rpc.channel import open_channel
from specd.rpc.credentials import ClientCredentials

__all__ = ["failures", "open_channel", "sleep", "token_metadata"]

sleep = asyncio.sleep


def token_metadata(_: ClientCredentials) -> Sequence[tuple[str, str]]:
    """Return the metadata that a call must carry for the client's token: the channel adds it itself."""
    return ()


@contextmanager
def failures(address: str, _: Connection) -> Iterator[None]:
    """Raise a SpecdError for an error of gRPC's in the block, CallError (CLIENT_CLOSED) for a call cancelled here."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_from(error, address) from error
    except asyncio.CancelledError as cancelled:
        # gRPC raises the same where the stream or the client was closed as where this task was cancelled.
        task = asyncio.current_task()
        if task is not None and task.cancelling() > 0:
            raise
        raise client_closed() from cancelled

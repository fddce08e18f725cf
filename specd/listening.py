"""Checks that addresses are free before a process listens there."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from specd.startup_error import StartupError

_MAX_SOCKET_PATH_BYTES = 103  # the limit of macOS; Linux allows four more


# What to do if the address of metrics is in use.
METRICS_REMEDY = "set --metrics-listen to another address, or to 'none'"


def hold(address: str) -> contextlib.AbstractContextManager[object]:
    """Return a context in which no other process can listen at HOST:PORT. Raises StartupError if one does already.

    The path of a Unix socket is only checked.
    """
    if address.startswith("unix:"):
        check_socket_path(address)
        return contextlib.nullcontext()
    return listen(address)


def hold_for_metrics(address: str) -> contextlib.AbstractContextManager[object]:
    """Return the same for the address of metrics, HOST:PORT or "" for none."""
    if not address:
        return contextlib.nullcontext()
    return listen(address, purpose="serve metrics", remedy=METRICS_REMEDY)


def listen(address: str, *, purpose: str = "listen", remedy: str = "choose another address") -> socket.socket:
    """Return a socket that takes connections at HOST:PORT. Raises StartupError if the port is in use."""
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as unless_it_fails:
        try:
            family, *_, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
            # The protocol is given, because asyncio sets TCP_NODELAY only on sockets that name it.
            listener = unless_it_fails.enter_context(socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen()  # before the process says that it is ready
        except OSError as error:
            raise StartupError(f"cannot {purpose} at {address}: {error.strerror}; {remedy}") from error
        listener.setblocking(False)
        unless_it_fails.pop_all()
        return listener


def check_socket_path(address: str) -> None:
    """Raise StartupError if a process cannot listen at unix:PATH, or another one does already."""
    path = Path(address.removeprefix("unix:"))
    if not path.parent.is_dir():
        raise StartupError(f"cannot listen at {address}: there is no directory {path.parent}")
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        raise StartupError(
            f"cannot listen at {address}: the path is longer than {_MAX_SOCKET_PATH_BYTES} bytes; choose a shorter one"
        )
    # gRPC would replace the socket even if another process listens on it.
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.connect(str(path))
        raise StartupError(f"cannot listen at {address}: it is in use by another process; choose another")

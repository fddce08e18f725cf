"""The line from a process to its supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from functools import cache

# File descriptor of a socket to the supervisor. The process writes lines of JSON to it: how far its start is, then its
# addresses once it is healthy, or why it cannot start. Then comes a beat, an empty line, every second: one that hangs
# is silent. It stops when the other end closes, so that it does not outlive its supervisor.
SUPERVISOR_FD_VARIABLE = "SPECD_SUPERVISOR_FD"
BEAT_SECONDS = 1.0


@cache
def supervisor() -> socket.socket | None:
    """Return the socket to the supervisor of this process; None if there is none."""
    fd = os.environ.pop(SUPERVISOR_FD_VARIABLE, "")
    if not fd:
        return None
    connection = socket.socket(fileno=int(fd))
    connection.set_inheritable(False)
    return connection


def tell_supervisor(**facts: str | float) -> bool:
    """Send these facts to the supervisor of this process, and say whether there is one. From any thread."""
    connection = supervisor()
    if connection is None:
        return False
    with contextlib.suppress(OSError):  # it is gone
        connection.sendall(json.dumps(facts).encode() + b"\n")
    return True

"""The connection from a process to its supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from functools import cache

# File descriptor of a socket to the supervisor. The process writes lines of JSON to it: the progress of its start, then
# its addresses once it is healthy, or the reason why it cannot start. After that it writes a beat, an empty line, every
# second, which a process that hangs does not. The process stops when the other end closes, so that it does not outlive
# its supervisor.
SUPERVISOR_FD_VARIABLE = "SPECD_SUPERVISOR_FD"
BEAT_SECONDS = 1.0


@cache
def supervisor() -> socket.socket | None:
    """Return the socket to the supervisor of this process, or None without a supervisor."""
    fd = os.environ.pop(SUPERVISOR_FD_VARIABLE, "")
    if not fd:
        return None
    connection = socket.socket(fileno=int(fd))
    connection.set_inheritable(False)
    return connection


def tell_supervisor(**facts: str | float) -> bool:
    """Send facts to the supervisor of this process, and return whether there is a supervisor. From any thread."""
    connection = supervisor()
    if connection is None:
        return False
    with contextlib.suppress(OSError):  # the supervisor has ended
        connection.sendall(json.dumps(facts).encode() + b"\n")
    return True

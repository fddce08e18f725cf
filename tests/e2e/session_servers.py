"""A real Valkey or Redis server."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from pathlib import Path

BINARY = shutil.which("valkey-server") or shutil.which("redis-server")


class LocalServer:
    """A server on this machine, which a test can kill; as a context manager, it ends."""

    def __init__(self, directory: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{port}"
        assert BINARY is not None
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
        self.process = subprocess.Popen([BINARY, *options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                return
            time.sleep(0.02)
        raise AssertionError("the server does not come")

    def __enter__(self) -> LocalServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait()

"""Endpoint, build info and histogram buckets that the metrics of all processes share."""

from __future__ import annotations

import platform
from http.server import HTTPServer

from prometheus_client import CollectorRegistry, Info, PlatformCollector, ProcessCollector, start_http_server

from specd import __version__
from specd.errors import StartupError

# From 0.1 ms, a message on loopback, to a minute, a long prefill.
SECONDS_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


def new_registry() -> CollectorRegistry:
    """Return a registry with process and platform metrics."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


def add_build_info(registry: CollectorRegistry, process: str, **build: str) -> None:
    """Add specd_build_info with the version and these labels."""
    info = Info("specd_build", "Version of specd and of what it runs on.", registry=registry)
    info.info({"version": __version__, "process": process, "python": platform.python_version(), **build})


class MetricsEndpoint:
    """HTTP server of a registry at /metrics, on its own thread, as a context manager."""

    def __init__(self, listen: str, registry: CollectorRegistry) -> None:
        """Serve at `listen`, HOST:PORT or "" for none. Raises StartupError if the port is in use."""
        self.address = ""
        self._server: HTTPServer | None = None
        if not listen:
            return
        host, _, port = listen.rpartition(":")
        try:
            self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        except OSError as error:
            raise StartupError(f"cannot serve metrics at {listen}: {error.strerror}; choose another port") from error
        self.address = f"{host}:{self._server.server_port}"

    def __enter__(self) -> MetricsEndpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

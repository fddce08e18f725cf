"""The endpoint, build info and histogram buckets that the metrics of all processes share."""

from __future__ import annotations

import platform
import socket
import ssl
import sys
import threading
from functools import partial
from http.server import ThreadingHTTPServer
from typing import Any, cast

import structlog
from prometheus_client import CollectorRegistry, Info, PlatformCollector, ProcessCollector
from prometheus_client.exposition import MetricsHandler

from specd.errors import StartupError
from specd.identity.certificates import Certificates
from specd.identity.roles import MAY_READ_METRICS, roles_in
from specd.listening import METRICS_REMEDY
from specd.version import __version__

log = structlog.get_logger()

_PATIENCE_SECONDS = 10.0
_POLL_SECONDS = 0.05  # between two looks of the server whether it has to stop

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
    info = Info("specd_build", "Versions of specd and of the libraries and hardware that it uses.", registry=registry)
    info.info({"version": __version__, "process": process, "python": platform.python_version(), **build})


class MetricsEndpoint:
    """HTTP server of a registry at /metrics, with threads of its own, as a context manager."""

    def __init__(self, listen: str, registry: CollectorRegistry, certificates: Certificates | None = None) -> None:
        """Serve at `listen`, HOST:PORT or "" for none; with certificates over TLS.

        If the certificates have an authority, readers must show a certificate for monitoring. Raises StartupError if
        the port is in use.
        """
        self.address = ""
        self.url = ""
        self._server: _Server | None = None
        if not listen:
            return
        host, _, port = listen.rpartition(":")
        try:
            self._server = _Server(host.strip("[]"), int(port), registry, certificates)
        except OSError as error:
            raise StartupError(f"cannot serve metrics at {listen}: {error.strerror}; {METRICS_REMEDY}") from error
        serve = partial(self._server.serve_forever, poll_interval=_POLL_SECONDS)
        self._thread = threading.Thread(target=serve, name="metrics", daemon=True)
        self._thread.start()
        self.address = f"{host}:{self._server.server_port}"
        self.url = f"{'https' if certificates is not None else 'http'}://{self.address}/metrics"

    def __enter__(self) -> MetricsEndpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


class _Server(ThreadingHTTPServer):
    """Answers each connection in a thread of its own, which also does the TLS handshake, with a time limit.

    prometheus_client's own server does handshakes in its accept loop, so one silent peer stops all others. Each
    connection gets the certificate that the files hold at that time.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, registry: CollectorRegistry, certificates: Certificates | None) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = family
        self._certificates = certificates
        self._lock = threading.Lock()
        self._context: tuple[int, ssl.SSLContext] | None = None
        super().__init__((str(address[0]), port), _Handler.factory(registry))

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self._certificates is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(_PATIENCE_SECONDS)
        with self._tls_context(self._certificates).wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request for metrics failed", error=repr(sys.exception()))

    def may_read(self, connection: Any) -> bool:
        """Return whether the peer of a connection may read the metrics."""
        if self._certificates is None or not self._certificates.has_ca:
            return True
        names = [name for kind, name in connection.getpeercert().get("subjectAltName", ()) if kind == "DNS"]
        return bool(roles_in(names) & MAY_READ_METRICS)

    def _tls_context(self, certificates: Certificates) -> ssl.SSLContext:
        certificates.refresh()
        with self._lock:
            if self._context is None or self._context[0] != certificates.generation:
                self._context = certificates.generation, certificates.ssl_context()
            return self._context[1]


class _Handler(MetricsHandler):
    timeout = _PATIENCE_SECONDS  # for a reader that sends or reads nothing
    server_version, sys_version = "specd", ""

    def do_GET(self) -> None:  # noqa: N802
        if cast("_Server", self.server).may_read(self.connection):
            super().do_GET()
        else:
            self.send_error(403, "metrics need a certificate for monitoring", "The certificate has another role.")

"""The life of a gRPC server process: bind, become healthy, announce, drain on the first signal, leave on the second."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specd.errors import StartupError

log = structlog.get_logger()

# A supervisor passes the number of a socket here. The process writes its addresses to it when it becomes healthy, and
# stops when the other end is closed: nothing that a supervisor started outlives it.
SUPERVISOR_FD_VARIABLE = "SPECD_SUPERVISOR_FD"

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_MAX_SOCKET_PATH_BYTES = 103  # macOS; Linux has four more

_CALL_TASK_NAME = "rpc_task"  # as grpc.aio names the tasks of its calls; tests/test_server.py notices when it does not
_LAST_STEPS_SECONDS = 1.0

_OPTIONS = [
    ("grpc.so_reuseport", 0),  # with it, two servers on one port both start, and share the calls
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Clients ping us to notice a hung peer soon: see specd/channel.py.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    # And a host that is gone must not keep the sessions of its streams.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
]


class _HealthServicer(health.aio.HealthServicer):
    """The standard health service, whose watches end when the server stops, and do not hold it up."""

    def __init__(self) -> None:
        super().__init__()
        self._stopping = asyncio.Event()

    async def Watch(  # noqa: N802
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse],
    ) -> None:
        watching = asyncio.ensure_future(super().Watch(request, context))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            stopping.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is stopping")

    async def enter_graceful_shutdown(self) -> None:
        await super().enter_graceful_shutdown()
        self._stopping.set()


class Server:
    """A gRPC server with the standard health and reflection services.

    Add services to `grpc`, then `start`. It reports NOT_SERVING until `set_serving(True)`.
    """

    def __init__(self, listen: str, service_names: Sequence[str]) -> None:
        """Make a server for `listen` (HOST:PORT or unix:PATH) with these fully qualified services."""
        self.listen = listen
        self.address = listen
        self.grpc = grpc.aio.server(options=_OPTIONS)
        self._services = ("", *service_names)
        self._health = _HealthServicer()
        self._stop = asyncio.Event()
        self._announced = False
        self._supervisor: socket.socket | None = None
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc)

    async def start(self) -> None:
        """Bind and listen. Raises StartupError when the address is taken or cannot be had."""
        _prepare_socket_path(self.listen)
        try:
            port = self.grpc.add_insecure_port(self.listen)
        except RuntimeError as error:
            raise StartupError(
                f"cannot listen at {self.listen}: it is in use, or not an address of this machine; choose another"
            ) from error
        if not self.listen.startswith("unix:"):
            self.address = f"{self.listen.rpartition(':')[0]}:{port}"
        await self.set_serving(False)
        await self.grpc.start()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        if fd := os.environ.pop(SUPERVISOR_FD_VARIABLE, ""):
            self._supervisor = socket.socket(fileno=int(fd))
            self._supervisor.set_inheritable(False)
            loop.add_reader(self._supervisor, self._on_supervisor_gone)

    async def set_serving(self, serving: bool) -> None:
        """Say to health checks whether this process can do its work."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in self._services:
            await self._health.set(service, status)

    @property
    def announced(self) -> bool:
        """Whether the process has been ready once."""
        return self._announced

    def announce(self, **facts: str) -> None:
        """Tell the log, and the supervisor if there is one, that the process is ready, once."""
        if self._announced:
            return
        self._announced = True
        log.info("ready", address=self.address, **facts)
        if self._supervisor is not None:
            self._supervisor.sendall(json.dumps({"address": self.address, **facts}).encode() + b"\n")

    async def wait_for_stop(self) -> None:
        """Wait for SIGINT or SIGTERM."""
        await self._stop.wait()

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, wait for running ones, then end them."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_seconds)
        # For gRPC's core a call is over when its status is sent. Its task can be a few steps behind, and a loop that
        # closes meanwhile cancels it: what it had to put away is lost, and the log gets a traceback.
        if calls := [task for task in asyncio.all_tasks() if task.get_name() == _CALL_TASK_NAME]:
            await asyncio.wait(calls, timeout=_LAST_STEPS_SECONDS)

    def _on_supervisor_gone(self) -> None:
        assert self._supervisor is not None
        asyncio.get_running_loop().remove_reader(self._supervisor)
        if not self._stop.is_set():
            log.warning("the supervisor is gone: stopping")
            self._stop.set()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            log.warning("second signal: leaving at once")
            os._exit(128 + number)
        log.info("stopping", signal=number.name)
        self._stop.set()


def _prepare_socket_path(listen: str) -> None:
    if listen.startswith("unix:"):
        path = Path(listen.removeprefix("unix:"))
        if not path.parent.is_dir():
            raise StartupError(f"cannot listen at {listen}: there is no directory {path.parent}")
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
            raise StartupError(
                f"cannot listen at {listen}: the path is too long (the most is {_MAX_SOCKET_PATH_BYTES})"
            )
        # gRPC replaces a socket that is there, whether or not somebody listens at it.
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(str(path))
            raise StartupError(f"cannot listen at {listen}: it is in use by another process; choose another")

"""The life of a gRPC server: bind, turn healthy, announce, drain."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, cast

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specd.errors import SpecdError, StartupError
from specd.lifeline import Lifeline
from specd.listening import check_socket_path
from specd.rpc.access import Guard
from specd.rpc.credentials import server_credentials
from specd.rpc.limits import MAX_MESSAGE_BYTES, MAX_STREAMS, ConnectionAge, connection_options
from specd.rpc.refusals import refusing_server

log = structlog.get_logger()

# A service that is healthy while the process answers, even if it cannot serve. Kubernetes asks for it to decide whether
# to restart a container: a coordinator that waits for its target should not be restarted.
LIVENESS = "liveness"

_CALL_TASK_NAME = "rpc_task"  # grpc.aio's name for the tasks of calls; tests/unit/test_server.py checks it
_LAST_STEPS_SECONDS = 1.0
_HAND_BACK_SECONDS = 3.0  # the time for callers to read the errors that end their calls

_OPTIONS = [
    ("grpc.so_reuseport", 0),  # otherwise two servers on one port both start and share the calls
    # Free the sessions of a client whose host is lost.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
]


class _HealthServicer(health.aio.HealthServicer):
    """The standard health service with List, which grpcio's own lacks. Its watches end when the server stops."""

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

    async def List(self, request: Any, context: Any) -> Any:  # noqa: N802 - its types are not in the stubs yet
        statuses: dict[str, int] = self._server_status  # type: ignore[attr-defined]
        answers = {name: health_pb2.HealthCheckResponse(status=cast(Any, status)) for name, status in statuses.items()}
        return health_pb2.HealthListResponse(statuses=answers)  # type: ignore[attr-defined]

    async def enter_graceful_shutdown(self) -> None:
        await super().enter_graceful_shutdown()
        self._stopping.set()


class Server:
    """A gRPC server with the standard health and reflection services.

    Add services to `grpc`, then `start`. It reports NOT_SERVING until `set_serving(True)`, except for LIVENESS.
    """

    def __init__(
        self,
        listen: str,
        service_names: Sequence[str],
        guard: Guard,
        *,
        max_streams: int = MAX_STREAMS,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        connection_age: ConnectionAge | None = None,
    ) -> None:
        """Serve at `listen` (HOST:PORT or unix:PATH). `service_names` are fully qualified.

        The `guard` admits callers. A connection has up to `max_streams` calls at a time, and a request up to
        `max_message_bytes`. Without a `connection_age`, a connection lasts as long as it is used.
        """
        self.listen = listen
        self.address = listen
        self._guard = guard
        options = [*_OPTIONS, *connection_options(max_streams, max_message_bytes)]
        options += connection_age.options if connection_age else []
        self.grpc = refusing_server(options, self._guard.identify, max_message_bytes)
        self._services = ("", *service_names)
        self._health = _HealthServicer()
        self._life = Lifeline()
        self._calls: set[asyncio.Timeout] = set()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc)

    async def start(self) -> None:
        """Bind and listen. Raises StartupError if the address cannot be bound."""
        if self.listen.startswith("unix:"):
            check_socket_path(self.listen)
        try:
            port = self._add_port()
        except RuntimeError as error:
            raise StartupError(
                f"cannot listen at {self.listen}: the address is in use or belongs to another machine; choose another"
            ) from error
        if not self.listen.startswith("unix:"):
            self.address = f"{self.listen.rpartition(':')[0]}:{port}"
        await self.set_serving(False)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.grpc.start()
        self._life.open()

    def _add_port(self) -> int:
        certificates = self._guard.certificates
        if certificates is None:
            return self.grpc.add_insecure_port(self.listen)
        credentials = server_credentials(certificates, wants_certificate=self._guard.wants_certificate)
        return self.grpc.add_secure_port(self.listen, credentials)

    async def set_serving(self, serving: bool) -> None:
        """Set the answer of health checks."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in self._services:
            await self._health.set(service, status)

    @property
    def announced(self) -> bool:
        """Whether `announce` has been called."""
        return self._life.announced

    def on_supervisor_message(self, take: Callable[[Mapping[str, Any]], None]) -> None:
        """Call `take` with each message of the supervisor."""
        self._life.on_message = take

    def announce(self, **facts: str) -> None:
        """Log that the process is ready, and tell the supervisor. Only the first call counts."""
        self._life.announce(self.address, **facts)

    async def wait_for_stop(self) -> None:
        """Wait for SIGINT or SIGTERM."""
        await self._life.wait_for_stop()

    @contextlib.asynccontextmanager
    async def until_stopped(self, error: Callable[[], SpecdError]) -> AsyncIterator[None]:
        """Run a call, and end it with `error()` if a stop has waited for it; gRPC itself would give no reason."""
        try:
            async with asyncio.timeout(None) as timeout:
                self._calls.add(timeout)
                try:
                    yield
                finally:
                    self._calls.discard(timeout)
        except TimeoutError:
            if not timeout.expired():
                raise
            raise error() from None

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, wait for running ones for the grace period, then end them."""
        await self._health.enter_graceful_shutdown()
        # The time to hand back begins when the calls are cancelled. With two timers from the start, a pause of the
        # machine would make both due at once, and callers would get no reason.
        draining = asyncio.ensure_future(self.grpc.stop(math.inf))
        await asyncio.wait({draining}, timeout=grace_seconds)
        if self._calls:
            self._end_calls()
            await asyncio.wait({draining}, timeout=_HAND_BACK_SECONDS)
        await self.grpc.stop(None)  # ends the calls that are left, and `draining`
        await draining
        # For gRPC's core a call is over when its status is sent, but its task may still be cleaning up. If the loop
        # closed now, the task would be cancelled, with a traceback in the log.
        if calls := [task for task in asyncio.all_tasks() if task.get_name() == _CALL_TASK_NAME]:
            await asyncio.wait(calls, timeout=_LAST_STEPS_SECONDS)

    def _end_calls(self) -> None:
        for timeout in tuple(self._calls):
            timeout.reschedule(asyncio.get_running_loop().time())

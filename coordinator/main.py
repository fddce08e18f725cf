"""The coordinator process.

It waits for the target without limit, and for the draft for a while. A draft with another tokenizer ends the process at
start-up; later it leaves sessions without a draft, visibly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from coordinator.cell import Cell
from coordinator.coordinator import Coordinator
from coordinator.service import GenerationService
from coordinator.session_service import SessionService
from coordinator.sessions.session_file import SessionFile
from coordinator.telemetry.metrics import CoordinatorMetrics
from specd.addresses import NAME_PREFIX, split_addresses
from specd.errors import StartupError
from specd.identity.certificates import Certificates, load_certificates
from specd.identity.roles import Role
from specd.identity.tokens import TokenFile
from specd.rpc.access import Guard
from specd.rpc.deferred import Deferred
from specd.rpc.limits import ConnectionAge
from specd.rpc.metrics_endpoint import MetricsEndpoint, add_build_info, new_registry
from specd.rpc.server import Server
from specd.settings import CoordinatorSettings
from specd.v1 import generation_pb2_grpc, session_pb2_grpc

if TYPE_CHECKING:
    from coordinator.telemetry.tracing import BeginTrace

log = structlog.get_logger()

_REVIEW_SECONDS = 10.0
_TARGETS_OF_A_NAME = 16  # The number of a name's targets is not known when the limit of calls is set.
_OTHER_STREAMS = 64  # of a connection, in addition to generations: health checks, sessions, and refused requests


async def run(settings: CoordinatorSettings) -> None:
    """Run the coordinator until a signal. Raises StartupError when it cannot start."""
    # Workers look for the role in the certificate; clients for the name of the host.
    role = Role.COORDINATOR if settings.reaches_workers_by_tls else None
    certificates = load_certificates(settings, role=role)
    tokens = TokenFile(Path(settings.tokens)) if settings.tokens else None
    guard = Guard(Role.COORDINATOR, listen=settings.listen, certificates=certificates, tokens=tokens)
    # One client may use all calls, so that refusals have a reason.
    addresses = split_addresses(settings.target)
    num_targets = sum(_TARGETS_OF_A_NAME if address.startswith(NAME_PREFIX) else 1 for address in addresses)
    max_sessions = settings.max_sessions * num_targets
    max_streams = max_sessions + settings.max_queued + _OTHER_STREAMS
    services = ("specd.v1.GenerationService", "specd.v1.SessionService")
    server = Server(
        settings.listen,
        services,
        guard,
        max_streams=max_streams,
        max_message_bytes=settings.max_request_bytes,
        connection_age=ConnectionAge(settings.connection_age_seconds, settings.connection_grace_seconds),
    )
    registry = new_registry()
    add_build_info(registry, "coordinator")
    metrics = CoordinatorMetrics(registry)
    deferred = Deferred[Coordinator]("the target worker")
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(
        GenerationService(deferred, metrics, server), server.grpc
    )
    session_pb2_grpc.add_SessionServiceServicer_to_server(SessionService(deferred, metrics), server.grpc)
    async with AsyncExitStack() as connections:
        endpoint = connections.enter_context(MetricsEndpoint(settings.metrics_listen, registry, certificates))
        begin_trace = connections.enter_context(_tracing(settings.otlp_endpoint))
        await server.start()
        starting = asyncio.ensure_future(_start(settings, certificates, server, metrics, begin_trace, connections))
        stopping = asyncio.ensure_future(server.wait_for_stop())
        try:
            # The workers may never come: a signal ends the wait for them.
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                coordinator = starting.result()
                deferred.set(coordinator)
                server.announce(metrics_address=endpoint.address, metrics_url=endpoint.url, **coordinator.model_names())
                await server.set_serving(coordinator.replicas.workers.model is not None)
                reviewing = asyncio.ensure_future(_review(coordinator))
                await stopping
                reviewing.cancel()
        finally:
            starting.cancel()
            stopping.cancel()
            await server.stop(settings.shutdown_grace_seconds)


def _tracing(endpoint: str) -> AbstractContextManager[BeginTrace | None]:
    if not endpoint:
        return nullcontext()
    try:
        from coordinator.telemetry.tracing import open_tracing
    except ImportError as error:
        raise StartupError(
            f"spans cannot go to {endpoint} without OpenTelemetry: install specd[tracing], or set no OTLP endpoint"
        ) from error
    return open_tracing(endpoint)


async def _review(coordinator: Coordinator) -> None:
    """Drop expired sessions, review waiting requests, and keep what was learnt, also when no client calls."""
    while True:
        await asyncio.sleep(_REVIEW_SECONDS)
        coordinator.sessions.expire()
        coordinator.admission.review()
        await coordinator.replicas.keep_learnt()


async def _start(
    settings: CoordinatorSettings,
    certificates: Certificates | None,
    server: Server,
    metrics: CoordinatorMetrics,
    begin_trace: BeginTrace | None,
    connections: AsyncExitStack,
) -> Coordinator:
    """Wait for the workers and check that they fit."""
    file = _open_session_file(settings, metrics)  # before the wait for workers: a wrong one is an error at once
    if file is not None:
        connections.push_async_callback(file.close)
    cell = Cell(settings, certificates, metrics, connections)
    model, tokenizer = await cell.connect_targets()
    await cell.connect_drafts()
    coordinator = Coordinator(
        settings, metrics, model=model, tokenizer=tokenizer, targets=cell.targets, drafts=cell.drafts
    )

    async def on_change() -> None:
        coordinator.replicas.recall_learnt()
        coordinator.admission.review()
        if server.announced:
            await server.set_serving(cell.targets.model is not None)

    cell.on_change = on_change
    await _keep_sessions(settings, coordinator, file)
    if settings.session_server:
        connections.push_async_callback(coordinator.keeper.close)
        connections.push_async_callback(coordinator.quotas.close)
    coordinator.begin_trace = begin_trace
    connections.push_async_callback(coordinator.renderer.close)
    connections.push_async_callback(coordinator.replicas.keep_learnt)
    return coordinator


def _open_session_file(settings: CoordinatorSettings, metrics: CoordinatorMetrics) -> SessionFile | None:
    """Open the session file, if the settings name one. Raises StartupError if it is required and cannot be used."""
    if not settings.session_file:
        return None
    with _session_file_required(settings):
        return SessionFile(Path(settings.session_file), metrics.count_unsaved_turn)
    return None


@contextmanager
def _session_file_required(settings: CoordinatorSettings) -> Iterator[None]:
    """Turn an error of the session file into a warning, unless the file is required."""
    try:
        yield
    except StartupError as error:
        if settings.session_file_required:
            raise
        log.warning("sessions are kept in memory alone", error=str(error))


async def _keep_sessions(settings: CoordinatorSettings, coordinator: Coordinator, file: SessionFile | None) -> None:
    """Keep sessions in the file, or on a server if the settings name one. Raises StartupError."""
    model, store = coordinator.model.fingerprint, coordinator.sessions
    if file is not None:
        with _session_file_required(settings):
            sessions = await asyncio.to_thread(file.load, model)
            coordinator.keep_sessions(file)
            store.restore(sessions)
    elif settings.session_server:
        try:
            from coordinator.sessions.session_server import SessionServer
            from coordinator.sessions.shared_quotas import SharedQuotas
        except ImportError as error:
            raise StartupError(
                "sessions cannot be kept on a server: install specd[valkey], which has its client, or set no server"
            ) from error
        on_failure = coordinator.metrics.count_unsaved_turn
        coordinator.keep_sessions(
            SessionServer(settings.session_server, model, store, settings.session_idle_seconds, on_failure)
        )
        coordinator.quotas = SharedQuotas(settings.session_server)

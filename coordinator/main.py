"""The coordinator process.

It waits for the target without limit, of several models for one target, and for the draft for a while. A draft with
another tokenizer ends the process at start-up; later it leaves sessions without a draft, visibly.
"""

from __future__ import annotations

import asyncio
import hashlib
import signal
import time
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from prometheus_client import CollectorRegistry

from coordinator.models.kept_sessions import KeptSessions
from coordinator.models.loader import Loader
from coordinator.models.models import Models
from coordinator.models.served_model import ServedModel, Shared
from coordinator.service import GenerationService
from coordinator.session_service import SessionService
from coordinator.sessions.quota import Quotas
from coordinator.telemetry.metrics import CoordinatorMetrics, error_counter
from coordinator.telemetry.model_registries import ModelRegistries
from specd.addresses import NAME_PREFIX, split_addresses
from specd.coordinator_settings import CoordinatorSettings
from specd.errors import StartupError
from specd.identity.certificates import load_certificates
from specd.identity.roles import Role
from specd.identity.tokens import TokenFile
from specd.model_entries import ModelEntries, ModelEntry, read_model_entries
from specd.rpc.access import Guard
from specd.rpc.limits import ConnectionAge
from specd.rpc.metrics_endpoint import MetricsEndpoint, add_build_info, new_registry
from specd.rpc.server import Server
from specd.supervised import supervisor
from specd.v1 import generation_pb2_grpc, session_pb2_grpc

if TYPE_CHECKING:
    from coordinator.telemetry.tracing import BeginTrace

log = structlog.get_logger()

_REVIEW_SECONDS = 10.0
_OTHER_MODELS_SECONDS = 10.0  # The start waits for them after the first model can serve.
_TARGETS_OF_A_NAME = 16  # The number of a name's targets is not known when the limit of calls is set.
_OTHER_STREAMS = 64  # of a connection, in addition to generations: health checks, sessions, and refused requests


async def run(settings: CoordinatorSettings) -> None:
    """Run the coordinator until a signal. Raises StartupError when it cannot start."""
    # Workers look for the role in the certificate; clients for the name of the host.
    role = Role.COORDINATOR if settings.reaches_workers_by_tls else None
    certificates = load_certificates(settings, role=role)
    tokens = TokenFile(Path(settings.tokens)) if settings.tokens else None
    guard = Guard(Role.COORDINATOR, listen=settings.listen, certificates=certificates, tokens=tokens)
    entries = _entries(settings)
    # One client may use all calls, so that refusals have a reason.
    addresses = [address for entry in entries.models for address in split_addresses(entry.target)]
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
    errors = error_counter(registry)
    shared = Shared(settings, certificates, Quotas(time.perf_counter))
    loader = Loader()
    models = _models(entries, shared, registry, loader)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(
        GenerationService(models, errors, server, stall_seconds=settings.client_stall_seconds), server.grpc
    )
    session_pb2_grpc.add_SessionServiceServicer_to_server(SessionService(models, errors), server.grpc)
    async with AsyncExitStack() as connections:
        connections.push_async_callback(models.close)
        endpoint = connections.enter_context(MetricsEndpoint(settings.metrics_listen, registry, certificates))
        shared.begin_trace = connections.enter_context(_tracing(settings.otlp_endpoint))
        await server.start()

        _connect(models, shared, loader, server)
        starting = asyncio.ensure_future(models.begin(_OTHER_MODELS_SECONDS))
        stopping = asyncio.ensure_future(server.wait_for_stop())
        try:
            # The workers may never come: a signal ends the wait for them.
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                server.announce(metrics_address=endpoint.address, metrics_url=endpoint.url, **models.facts())
                await server.set_serving(models.are_serving)
                reviewing = asyncio.ensure_future(_review(models))
                await stopping
                reviewing.cancel()
        finally:
            starting.cancel()
            stopping.cancel()
            await server.stop(settings.shutdown_grace_seconds)


def _connect(models: Models, shared: Shared, loader: Loader, server: Server) -> None:
    """Let the health of the server follow the models, and the models their file and the supervisor."""

    def read_again() -> None:
        try:
            models.replace(read_model_entries(Path(shared.settings.models)))
        except StartupError as error:
            log.error("the models stay as they are", error=str(error))

    async def show_serving() -> None:
        if server.announced:
            await server.set_serving(models.are_serving)

    shared.on_change = show_serving
    loader.on_models = read_again
    server.on_supervisor_message(loader.take)
    if shared.settings.models:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, read_again)


def _entries(settings: CoordinatorSettings) -> ModelEntries:
    """Return the models of the settings, one without a name or several from a file. Raises StartupError."""
    if not settings.models:
        return ModelEntries((ModelEntry("", settings.target, settings.draft),))
    entries = read_model_entries(Path(settings.models))
    if any(entry.key for entry in entries.models) and supervisor() is None:
        raise StartupError(f"the file of models {settings.models} has a key, and there is no supervisor to load it")
    return entries


def _models(entries: ModelEntries, shared: Shared, registry: CollectorRegistry, loader: Loader) -> Models:
    """Return the models of these entries. Raises StartupError."""
    settings = shared.settings
    registries = ModelRegistries()
    known: dict[str, CoordinatorMetrics] = {}
    if settings.models:
        registry.register(registries)

    def new_model(entry: ModelEntry, before: ServedModel | None) -> ServedModel:
        if entry.name not in known:
            known[entry.name] = CoordinatorMetrics(registries.of(entry.name) if settings.models else registry)
        metrics = known[entry.name]
        sessions = before.sessions if before is not None else KeptSessions(settings, metrics, _file_of(entry, settings))
        model = ServedModel(entry, shared, metrics, sessions)
        if before is None:
            model.show_state()
        return model

    def forget(name: str) -> None:
        known.pop(name, None)
        registries.forget(name)

    models = Models(entries, new_model, loader, shared.num_requests)
    models.on_gone = forget
    return models


def _file_of(entry: ModelEntry, settings: CoordinatorSettings) -> Path | None:
    """Return the session file of a model; each of several models has one of its own."""
    if not settings.session_file:
        return None
    path = Path(settings.session_file)
    digest = hashlib.sha256(entry.name.encode()).hexdigest()[:12]
    return path.with_name(f"{path.stem}-{digest}{path.suffix}") if entry.name else path


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


async def _review(models: Models) -> None:
    """Drop expired sessions, review waiting requests, and keep what was learnt, also when no client calls."""
    while True:
        await asyncio.sleep(_REVIEW_SECONDS)
        models.review()
        for model in models.all:
            model.sessions.store.expire()
        for model in models.present:
            if model.coordinator is not None:
                model.coordinator.admission.review()
                await model.coordinator.replicas.keep_learnt()

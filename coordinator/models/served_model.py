"""A model under its name, with its workers while they are loaded."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import structlog

from coordinator.cell import Cell
from coordinator.coordinator import Coordinator
from coordinator.models.kept_sessions import KeptSessions
from coordinator.sessions.quota import Quotas
from coordinator.sessions.request_counts import RequestCounts
from coordinator.telemetry.metrics import CoordinatorMetrics
from specd.coordinator_settings import CoordinatorSettings
from specd.errors import SpecdError, StartupError
from specd.identity.certificates import Certificates
from specd.model_entries import ModelEntry
from specd.model_info import ModelInfo
from specd.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from coordinator.telemetry.tracing import BeginTrace

log = structlog.get_logger()


class ModelState(enum.Enum):
    """Whether a model can serve requests."""

    UNLOADED = "unloaded"
    WAITING = "waiting for memory"
    LOADING = "loading"
    READY = "ready"
    LEAVING = "leaving"  # its last requests run


@dataclass
class Shared:
    """The parts of a coordinator that all its models share."""

    settings: CoordinatorSettings
    certificates: Certificates | None
    quotas: Quotas
    num_requests: RequestCounts = field(default_factory=RequestCounts)
    begin_trace: BeginTrace | None = None
    on_change: Callable[[], Awaitable[None]] | None = None  # called when a target comes or goes


class ServedModel:
    """A model of a coordinator. `open` connects to its workers, and `close` ends that; both can be repeated."""

    def __init__(self, entry: ModelEntry, shared: Shared, metrics: CoordinatorMetrics, sessions: KeptSessions) -> None:
        self.entry, self.metrics, self.sessions = entry, metrics, sessions
        self._shared = shared
        self.state = ModelState.UNLOADED
        self.coordinator: Coordinator | None = None
        # The last known ones: the tokenizer, and the models that a request can name, the target first.
        self.tokenizer: Tokenizer | None = None
        self._infos: list[ModelInfo] = []
        self.num_users = 0  # requests that run
        self.last_used_at = 0.0
        self.loading: asyncio.Task[None] | None = None
        self._connections = AsyncExitStack()

    @property
    def name(self) -> str:
        """The name by which requests choose it; "" for the model of a coordinator that serves one."""
        return self.entry.name

    @property
    def is_connected(self) -> bool:
        """Whether a target is there."""
        return self.coordinator is not None and self.coordinator.replicas.workers.model is not None

    @property
    def infos(self) -> list[ModelInfo]:
        """The target and its adapters; empty before they were loaded for the first time."""
        return self.coordinator.models if self.coordinator is not None else self._infos

    def show_state(self) -> None:
        """Let the metrics of the name be those of this model, with the state of one that is loaded on demand."""
        self.metrics.subject = self
        for state in ModelState if self.entry.key else ():
            self.metrics.show("model_state", partial(self._is, state), state.name.lower())

    def report(self, event: str, error: Exception) -> None:
        """Log why it is not served, with the traceback of a fault of ours."""
        is_known = isinstance(error, (SpecdError, StartupError))
        log.error(event, model=self.name, reason=str(error) if is_known else repr(error), exc_info=not is_known)

    def _is(self, state: ModelState) -> bool:
        return self.state is state

    async def open(self) -> Coordinator:
        """Wait for the workers, and check that they fit. Raises StartupError."""
        shared, metrics = self._shared, self.metrics
        settings = shared.settings.model_copy(update={"target": self.entry.target, "draft": self.entry.draft})
        connections = AsyncExitStack()
        try:
            cell = Cell(settings, shared.certificates, metrics, connections)
            model, tokenizer = await cell.connect_targets()
            await cell.connect_drafts()
            shared.quotas = await self.sessions.begin(model, shared.quotas)
            coordinator = Coordinator(
                settings,
                metrics,
                model=model,
                name=self.name,
                tokenizer=tokenizer,
                targets=cell.targets,
                drafts=cell.drafts,
                canary=cell.canary,
                sessions=self.sessions.store,
                num_requests=shared.num_requests,
            )
            coordinator.keeper, coordinator.quotas = self.sessions.keeper, shared.quotas
            coordinator.begin_trace = shared.begin_trace
            connections.push_async_callback(coordinator.renderer.close)
            connections.push_async_callback(coordinator.replicas.keep_learnt)
            connections.callback(coordinator.hide_targets)
        except BaseException:
            await connections.aclose()
            raise

        async def on_change() -> None:
            coordinator.replicas.recall_learnt()
            coordinator.admission.review()
            if shared.on_change is not None:
                await shared.on_change()

        cell.on_change = on_change
        self.coordinator, self.tokenizer, self._connections = coordinator, tokenizer, connections
        self.show_state()  # of the model before, until then
        return coordinator

    async def close(self) -> None:
        """Leave the workers. The sessions stay."""
        self._infos, self.coordinator = self.infos, None
        await self._connections.aclose()
        if self.metrics.subject is self:
            self.metrics.show_no_workers()

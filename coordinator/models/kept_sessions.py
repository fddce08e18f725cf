"""The sessions of a model, which outlive its workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from coordinator.sessions.quota import Quotas
from coordinator.sessions.session_file import SessionFile
from coordinator.sessions.session_keeper import SessionKeeper
from coordinator.sessions.session_store import SessionStore
from coordinator.telemetry.metrics import CoordinatorMetrics
from specd.coordinator_settings import CoordinatorSettings
from specd.errors import StartupError
from specd.model_info import ModelInfo

log = structlog.get_logger()


class KeptSessions:
    """The sessions of a model's name. They outlive its workers, and the model if another one has the same tokens."""

    def __init__(self, settings: CoordinatorSettings, metrics: CoordinatorMetrics, path: Path | None) -> None:
        """Open the session file at `path`, if there is one. Raises StartupError if a required one cannot be used."""
        self._settings, self._metrics = settings, metrics
        self.store = SessionStore(
            settings.session_idle_seconds, settings.session_budget_tokens, time.time, time.monotonic
        )
        self.keeper = SessionKeeper()
        self.model: ModelInfo | None = None  # it has chosen their tokens
        self._file: SessionFile | None = None
        if path is not None:
            with self._file_required():
                self._file = SessionFile(path, metrics.count_unsaved_turn)

    async def recall(self) -> None:
        """Restore the sessions of the file, before the model is loaded. Raises StartupError."""
        if self._file is not None:
            with self._file_required():
                self.store.restore(await asyncio.to_thread(self._file.load_all))
                self._keep(self._file)

    async def begin(self, model: ModelInfo, quotas: Quotas) -> Quotas:
        """Keep this model's sessions from now on, and return its quotas. Raises StartupError.

        The sessions of another model are forgotten, unless it has the same tokens.
        """
        before, self.model = self.model, model
        has_same_tokens = before is not None and before.vocabulary_fingerprint == model.vocabulary_fingerprint
        if before is not None and not has_same_tokens:
            self.store.clear()
        if self._file is not None and has_same_tokens:
            await asyncio.to_thread(self._file.rename_model, model.fingerprint)
        elif self._file is not None:
            with self._file_required():
                sessions = await asyncio.to_thread(self._file.load, model.fingerprint)
                self.store.on_forget = lambda session: None
                self.store.clear()
                self._keep(self._file)
                self.store.restore(sessions)
        elif self._settings.session_server:
            return await self._use_server(model, quotas)
        return quotas

    async def close(self) -> None:
        """Finish all writes."""
        await self.keeper.close()
        if self._file is not None and self._file is not self.keeper:
            await self._file.close()

    async def _use_server(self, model: ModelInfo, quotas: Quotas) -> Quotas:
        try:
            from coordinator.sessions.session_server import SessionServer
            from coordinator.sessions.shared_quotas import SharedQuotas
        except ImportError as error:
            raise StartupError(
                "sessions cannot be kept on a server: install specd[valkey], which has its client, or set no server"
            ) from error
        settings, on_failure = self._settings, self._metrics.count_unsaved_turn
        await self.keeper.close()
        self._keep(
            SessionServer(
                settings.session_server, model.fingerprint, self.store, settings.session_idle_seconds, on_failure
            )
        )
        return quotas if isinstance(quotas, SharedQuotas) else SharedQuotas(settings.session_server)

    def _keep(self, keeper: SessionKeeper) -> None:
        self.keeper = keeper
        self.store.on_forget = keeper.forget

    @contextmanager
    def _file_required(self) -> Iterator[None]:
        """Turn an error of the session file into a warning, unless the file is required."""
        try:
            yield
        except StartupError as error:
            if self._settings.session_file_required:
                raise
            log.warning("sessions are kept in memory alone", error=str(error))

"""Models of a coordinator that is there already, as services want them."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry

from coordinator.coordinator import Coordinator
from coordinator.models.kept_sessions import KeptSessions
from coordinator.models.loader import Loader
from coordinator.models.models import Models
from coordinator.models.served_model import ModelState, ServedModel, Shared
from coordinator.sessions.quota import Quotas
from coordinator.sessions.session_store import SessionStore
from coordinator.telemetry.metrics import CoordinatorMetrics
from specd.coordinator_settings import CoordinatorSettings
from specd.model_entries import ModelEntries, ModelEntry


def new_store() -> SessionStore:
    """Return a place for sessions, with the usual limits."""
    return SessionStore(600.0, 1_000_000, time.time, time.monotonic)


def models_of(coordinator: Coordinator) -> Models:
    """Return the models of a coordinator that serves one."""
    settings = CoordinatorSettings.model_validate({"draft": "none"})
    metrics = CoordinatorMetrics(CollectorRegistry())

    def new_model(entry: ModelEntry, before: ServedModel | None) -> ServedModel:
        model = ServedModel(
            entry, Shared(settings, None, Quotas(time.perf_counter)), metrics, KeptSessions(settings, metrics, None)
        )
        model.sessions.store = coordinator.sessions
        model.sessions.keeper = coordinator.keeper
        model.coordinator, model.tokenizer, model.state = coordinator, coordinator.tokenizer, ModelState.READY
        return model

    return Models(ModelEntries((ModelEntry("", "unix:target"),)), new_model, Loader())

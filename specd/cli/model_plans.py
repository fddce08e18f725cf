"""The plans for the models of `specd up --models`: checked, with their drafts, their options and their memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog
from pydantic import ByteSize, TypeAdapter

from specd.adapter_settings import split_adapters
from specd.cli.auto_draft import AutoDraft
from specd.cli.model_file import ModelFile, ModelTable, of_one_model
from specd.cli.models.pull import pull
from specd.cli.pairs.memory import in_gigabytes, memory_here
from specd.cli.preflight import Preflight
from specd.launch import start_logging
from specd.machine import model_memory
from specd.model_processes import ModelPlan, ModelPlans
from specd.settings import DraftWorkerSettings, TargetWorkerSettings, WorkerSettings, load_settings
from specd.startup_error import StartupError
from specd.up_settings import UpSettings
from specd.worker.model.directory import is_repository
from specd.worker_group import WorkerModels

log = structlog.get_logger()

# The part of the machine's memory that models may have by default: the rest is for the system and other programs.
_BUDGET_SHARE = 0.75
# The parts of the budget that a model's caches may have by default, as a worker by itself has parts of the memory.
_CACHE_PARTS = {
    "target-worker": {"cache_bytes": 8, "prefix_cache_bytes": 32},
    "draft-worker": {"cache_bytes": 32, "prefix_cache_bytes": 64},
}
# The resident memory of a worker's process without weights and caches: 150 MB on Linux with MLX for CPUs.
_PROCESS_BYTES = 200 * 2**20


def plans_of(file: ModelFile, base: UpSettings) -> ModelPlans:
    """Return the plans for the models in a file, after all checks; missing weights are downloaded first.

    Raises StartupError, which names the model.
    """
    budget = file.budget_bytes
    if budget is None and (there := model_memory()) is not None:
        budget = int(_BUDGET_SHARE * there)
    plans = []
    for name, table in file.models.items():
        try:
            plans.append(_plan(name, table, file, base, budget))
        except StartupError as error:
            raise StartupError(f"the model {name}: {error}") from error
    pinned = sum(plan.num_bytes for plan in plans if plan.pinned)
    for plan in plans:
        needed = pinned + (0 if plan.pinned else plan.num_bytes)
        if budget is not None and needed > budget:
            beside = " beside the pinned models" if needed > plan.num_bytes else ""
            raise StartupError(
                f"the model {plan.name}: it needs {in_gigabytes(plan.num_bytes)} with its caches{beside}, "
                f"{in_gigabytes(needed)} in all, and the budget is {in_gigabytes(budget)}: raise the budget, pin fewer "
                "models, or choose smaller models or smaller cache_bytes"
            )
    return ModelPlans(tuple(plans), budget)


def _plan(name: str, table: ModelTable, file: ModelFile, base: UpSettings, budget: int | None) -> ModelPlan:
    own = {name: getattr(table, name) for name in of_one_model()}
    settings = load_settings(UpSettings, {**own, "metrics": False})
    for model in (settings.target, settings.draft_model):
        _fetch(model)
    settings = _with_draft(settings)
    preflight = Preflight(settings)
    preflight.check_models(before_download=lambda: start_logging("up"))
    options = preflight.options
    metrics = "127.0.0.1:0" if base.metrics else "none"
    for worker, values in (("target-worker", table.target_worker), ("draft-worker", table.draft_worker)):
        given = {each: str(value) for each, value in values.items()}
        options[worker] = {
            **_caches(worker, given, budget),
            **options.get(worker, {}),
            **given,
            "metrics_listen": metrics,
        }
    num_bytes = _memory(settings, options)
    log.info(
        "planned a model", model=name, target=settings.target, draft=settings.draft, memory=in_gigabytes(num_bytes)
    )
    workers = WorkerModels(
        settings.target,
        settings.draft_worker_model,
        settings.targets,
        settings.target_ranks,
        name,
        {worker: own for worker, own in options.items() if worker != "coordinator"},
    )
    return ModelPlan(
        workers, tuple(split_adapters(settings.target_adapters)), num_bytes, table.pinned, file.idle_seconds_of(name)
    )


def _with_draft(settings: UpSettings) -> UpSettings:
    """Return the settings with a draft: for `auto` the remembered one, or else the fastest by a short trial now."""
    auto = AutoDraft(settings)
    if auto.is_open:
        preflight = Preflight(settings)
        preflight.check_models(before_download=lambda: start_logging("up"))
        assert preflight.target is not None
        auto.measure(preflight.target, None)
    return auto.settings


def _fetch(model: str) -> None:
    """Download a repository that is not on this machine: its memory is planned by its files. Raises StartupError."""
    if model and is_repository(model) and memory_here(model) is None:
        log.info("downloading a model", model=model)
        pull(model, None, lambda done, total: None)


def _caches(worker: str, given: Mapping[str, Any], budget: int | None) -> dict[str, str | None]:
    """Return the sizes of caches that neither the file nor the worker's own settings say."""
    cls = TargetWorkerSettings if worker == "target-worker" else DraftWorkerSettings
    if budget is None:
        return {}
    parts = _CACHE_PARTS[worker].items()
    return {name: str(budget // part) for name, part in parts if name not in given and not cls.is_given(name)}


def _memory(settings: UpSettings, options: Mapping[str, Mapping[str, str | None]]) -> int:
    """Return the memory that a model's workers may need: weights, caches at their limits, and the processes."""
    kinds: tuple[tuple[str, type[WorkerSettings], str, int], ...] = (
        ("target-worker", TargetWorkerSettings, settings.target, settings.targets * settings.target_ranks),
        ("draft-worker", DraftWorkerSettings, settings.draft_worker_model, 1),
    )
    total = 0
    for worker, cls, model, number in kinds:
        if not model:
            continue
        memory = memory_here(model)
        weights = memory.weights if memory is not None else 0
        if worker == "target-worker":
            weights *= settings.targets  # ranks share them
        defaults = load_settings(cls, {"model": model, "listen": "unix:worker"})
        caches = [
            TypeAdapter(ByteSize).validate_python(options[worker].get(name) or getattr(defaults, name))
            for name in _CACHE_PARTS[worker]
        ]
        total += weights + number * (sum(caches) + _PROCESS_BYTES)
    if settings.draft_in_target and settings.draft_model:
        own = memory_here(settings.draft_model)
        total += own.weights * settings.targets if own is not None else 0
    return total

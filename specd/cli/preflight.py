"""Checks that `specd up` makes before it starts a process: settings, files, ports and models."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specd.addresses import from_here, is_local
from specd.cli.pairs.memory import PairMemory, memory_here
from specd.coordinator_settings import CoordinatorSettings
from specd.gateway_settings import GatewaySettings
from specd.identity.roles import Role
from specd.listening import hold, listen
from specd.machine import nvidia_gpus
from specd.settings import (
    CertificateSettings,
    DraftWorkerSettings,
    ListenerSettings,
    SettingsT,
    TargetWorkerSettings,
    WorkerSettings,
    load_settings,
)
from specd.startup_error import StartupError
from specd.up_settings import UpSettings
from specd.worker.model.adapter_files import read_adapters
from specd.worker.model.directory import is_repository
from specd.worker.model.outline import Outline, check_draft, outline_of
from specd.worker_group import CANARY_NAME, target_names

# What several targets share on a machine.
_SHARED = ("blas_threads", "cache_bytes", "prefix_cache_bytes")
_OF_COORDINATOR = ("canary_share", "tls_cert", "tls_key", "tls_ca", "tokens")


@dataclass
class Preflight:
    """The checks of a `specd up`, and their results.

    `options` are further options of the processes, by process and name. `moved` are the processes that serve metrics at
    another port than the default. `target` is the target model as its small files describe it.
    """

    settings: UpSettings
    options: dict[str, dict[str, str | None]] = field(default_factory=dict)
    moved: list[str] = field(default_factory=list)
    target: Outline | None = None
    coordinator: CoordinatorSettings | None = None
    _problems: list[str] = field(default_factory=list)

    def check(self, before_download: Callable[[], None]) -> None:
        """Check everything. Raises StartupError, which names all problems.

        Calls `before_download` if there is a repository to look at.
        """
        with contextlib.ExitStack() as listeners:
            self._check_services(listeners)
            self._check_workers(listeners)
        self._check_files(before_download)

    def check_services(self) -> None:
        """Check all but the models and their workers. Raises StartupError, which names all problems."""
        with contextlib.ExitStack() as listeners:
            self._check_services(listeners)
        self._raise_problems()

    def check_models(self, before_download: Callable[[], None]) -> None:
        """Check the models and their workers, as `check` does."""
        with contextlib.ExitStack() as listeners:
            self._check_workers(listeners)
        self._check_files(before_download)

    def _check_services(self, listeners: contextlib.ExitStack) -> None:
        self._check_coordinator(listeners)
        if self.settings.http:
            self._check_gateway(listeners)

    def _check_files(self, before_download: Callable[[], None]) -> None:
        canary = self.settings.canary_draft
        names = [name for name in (self.settings.target, self.settings.draft_model, canary) if name]
        # Repositories come last, because they may take a while.
        outlines = self._outlines([name for name in names if not is_repository(name)])
        self._raise_problems()
        if repositories := [name for name in names if is_repository(name)]:
            before_download()
            outlines |= self._outlines(repositories)
            self._raise_problems()
        self.target = outlines[self.settings.target]
        draft = outlines[self.settings.draft_model] if self.settings.draft_model else None
        check_draft(self.target, draft, in_target=self.settings.draft_in_target)
        check_draft(self.target, outlines[canary] if canary else None, in_target=False)
        self._check_memory(draft)

    def _check_memory(self, draft: Outline | None) -> None:
        """Raise StartupError if the weights are larger than the memory, and warn if they may not fit."""
        settings = self.settings
        target = memory_here(settings.target)
        if target is None or settings.target_ranks > 1:  # ranks can have several machines
            return
        own = memory_here(settings.draft_model) if draft is not None and not draft.is_head else None
        pair = PairMemory.on_this_machine(target, own, settings.targets)
        if pair.problem:
            raise StartupError(f"the models do not fit: {pair.problem}")
        if pair.warning:
            import structlog  # takes long

            structlog.get_logger().warning("the models may not fit", reason=pair.warning)

    def _raise_problems(self) -> None:
        if self._problems:
            raise StartupError("; ".join(dict.fromkeys(self._problems)))

    def _outlines(self, names: list[str]) -> dict[str, Outline]:
        """Return the outlines of models by name, without the models that have problems."""
        outlines = {}
        with ThreadPoolExecutor(2) as threads:
            for name, outline in [(name, threads.submit(outline_of, name)) for name in names]:
                with self._noted():
                    outlines[name] = outline.result()
        return outlines

    def _check_coordinator(self, listeners: contextlib.ExitStack) -> None:
        settings = self.settings
        names = [name for name in _OF_COORDINATOR if name in settings.model_fields_set]
        given = {name: getattr(settings, name) or "none" for name in names}
        chosen = settings.source_settings()
        flags = {name if is_on else f"no-{name}": None for name, is_on in chosen.items()}
        self.options["coordinator"] = {**given, **flags}
        own = {"listen": settings.listen, "insecure": settings.insecure, "target": "unix:target"}
        own["draft"] = "unix:draft" if self.settings.draft_worker_model else "none"
        self.coordinator = self._loaded(CoordinatorSettings, {**own, **given, **chosen}, None)
        if self.coordinator is None:
            return
        is_given = any(map(CoordinatorSettings.is_given, ("session_file", "session_server")))
        if settings.session_file != "auto" or not is_given:
            file = settings.coordinator_session_file(has_tokens=bool(self.coordinator.tokens))
            self.options["coordinator"]["session_file"] = file
            if settings.session_file == "auto":  # which must not keep anyone from serving
                self.options["coordinator"]["no-session-file-required"] = None
        self._check_address(self.coordinator.listen, listeners)
        self._check_metrics("coordinator", self.coordinator, listeners)
        if self.coordinator.tokens:
            from specd.identity.tokens import read_tokens

            with self._noted():
                read_tokens(Path(self.coordinator.tokens))
        if self.coordinator.otlp_endpoint and importlib.util.find_spec("opentelemetry") is None:
            self._problems.append(
                f"OpenTelemetry, which sends spans to {self.coordinator.otlp_endpoint}, is not installed: install "
                "specd[tracing], or set no OTLP endpoint"
            )

    def _check_workers(self, listeners: contextlib.ExitStack) -> None:
        kinds: tuple[tuple[str, Role, type[WorkerSettings], str], ...] = (
            ("target-worker", Role.TARGET_WORKER, TargetWorkerSettings, self.settings.target),
            ("draft-worker", Role.DRAFT_WORKER, DraftWorkerSettings, self.settings.draft_worker_model),
        )
        self.options["target-worker"] = self._shares()
        if self.settings.draft_in_target or not TargetWorkerSettings.is_given("self_draft"):
            self.options["target-worker"]["self_draft"] = self.settings.self_draft or "none"
        for process, role, cls, model in kinds:
            adapters = self._adapters_of(process)
            if model:
                with self._noted():
                    read_adapters(adapters, model)
                loaded = self._loaded(cls, {"model": model, "listen": "unix:worker"}, role)
                if loaded is not None:
                    self._check_metrics(process, loaded, listeners)
                    if loaded.metrics_listen:
                        self._move_metrics_of_others(process, loaded.metrics_listen)

    def _adapters_of(self, process: str) -> str:
        """Return the adapters of a worker, and pass them on to it; without any, it has those of its own settings."""
        adapters = self.settings.target_adapters if process == "target-worker" else self.settings.draft_adapters
        if adapters:
            self.options.setdefault(process, {})["adapters"] = adapters
        return adapters

    def _move_metrics_of_others(self, process: str, metrics_listen: str) -> None:
        """Give further workers of a kind free ports."""
        canaries = [CANARY_NAME] if self.settings.canary_draft else []
        for name in target_names(self.settings.targets)[1:] if process == "target-worker" else canaries:
            host = metrics_listen.rpartition(":")[0]
            self.options[name] = {"metrics_listen": f"{host}:0"} if self.settings.metrics else {}

    def _shares(self) -> dict[str, str | None]:
        """Return the options by which several targets on this machine share its memory and cores."""
        number = self.settings.targets * self.settings.target_ranks
        share = -(-number // max(len(nvidia_gpus()), 1))
        own = load_settings(TargetWorkerSettings, {}) if share > 1 else None
        values = {name: str(max(getattr(own, name) // share, 1)) for name in _SHARED} if own else {}
        return {name: value for name, value in values.items() if not TargetWorkerSettings.is_given(name)}

    def _check_gateway(self, listeners: contextlib.ExitStack) -> None:
        settings, coordinator = self.settings, self.coordinator
        own = {"listen": settings.http, "insecure": settings.insecure, "coordinator": from_here(settings.listen)}
        derived: dict[str, str] = {}
        if coordinator is not None and coordinator.tls_cert and not coordinator.listen.startswith("unix:"):
            with self._noted():
                derived = _follow(coordinator, settings.http)
        followed = {name: value for name, value in derived.items() if not GatewaySettings.is_given(name)}
        self.options["gateway"] = {**followed}
        gateway = self._loaded(GatewaySettings, {**own, **followed}, None)
        self._check_address(settings.http, listeners)
        asks_for_certificate = coordinator is not None and coordinator.tls_ca and not coordinator.tokens
        if gateway is not None and derived and asks_for_certificate and not gateway.coordinator_cert:
            self._problems.append(
                "the gateway has no certificate, which this coordinator asks for: set SPECD_GATEWAY_COORDINATOR_CERT "
                "and SPECD_GATEWAY_COORDINATOR_KEY to the gateway's files, or give clients tokens with --tokens"
            )

    def _check_metrics(self, process: str, settings: ListenerSettings, listeners: contextlib.ExitStack) -> None:
        """Choose a free port if the default one is in use. A port that the user has set must be free."""
        if not (self.settings.metrics and settings.metrics_listen):
            return
        try:
            listeners.enter_context(listen(settings.metrics_listen))
        except StartupError as error:
            if settings.is_given("metrics_listen"):
                self._problems.append(f"the metrics of the {process}: {error}, or --no-metrics")
                return
            self.moved.append(process)
            host, _, _ = settings.metrics_listen.rpartition(":")
            self.options.setdefault(process, {})["metrics_listen"] = f"{host}:0"

    def _check_address(self, address: str, listeners: contextlib.ExitStack) -> None:
        with self._noted():
            listeners.enter_context(hold(address))

    def _loaded(self, cls: type[SettingsT], flags: dict[str, Any], role: Role | None) -> SettingsT | None:
        """Return the settings that a process will load, with its certificates checked."""
        with self._noted():
            settings = load_settings(cls, flags)
            if isinstance(settings, CertificateSettings) and settings.tls_cert:
                from specd.identity.certificates import load_certificates

                load_certificates(settings, role=role)
            return settings
        return None

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except StartupError as error:
            self._problems.append(str(error).removeprefix("wrong settings: "))


def _follow(coordinator: CoordinatorSettings, http: str) -> dict[str, str]:
    """Return the options of a gateway that suit a coordinator with TLS. Raises StartupError.

    Where other machines reach the gateway, it shows the coordinator's certificate and asks clients for the same proof.
    """
    from specd.identity.certificates import authority_of, name_of

    host = from_here(coordinator.listen).rpartition(":")[0].strip("[]")
    certificate, authority = Path(coordinator.tls_cert), Path(coordinator.tls_ca) if coordinator.tls_ca else None
    options = {
        "coordinator_ca": str(authority_of(certificate, authority)),
        "coordinator_name": name_of(certificate, host),
    }
    if not is_local(http):
        options |= {"tls_cert": coordinator.tls_cert, "tls_key": coordinator.tls_key}
        if coordinator.tls_ca and not coordinator.tokens:
            options["tls_ca"] = coordinator.tls_ca
    return {name: value for name, value in options.items() if value}

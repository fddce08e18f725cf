"""Supervisor of the processes: starts, restarts and stops them.

A process that ends is restarted, with a growing pause. Without the draft worker the target decodes alone, and without
the gateway clients have gRPC. A coordinator, or the last target worker, that ends repeatedly ends the supervisor. Where
there are several models, one that ends repeatedly is not served until the coordinator asks for it again.
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from specd.addresses import from_here
from specd.child import Child, together
from specd.model_processes import ModelPlans, ModelProcesses
from specd.worker_group import WorkerGroup, WorkerModels

_PATIENCE = ["--draft-startup-seconds", "86400"]

# Environment without prefix caches, so that workers compute every prompt.
NO_PREFIX_CACHE = {f"SPECD_{worker}_WORKER_PREFIX_CACHE_BYTES": "0" for worker in ("DRAFT", "TARGET")}


class Stack:
    """Draft worker, target workers, coordinator and, if wanted, gateway on this host, as an async context manager.

    The workers listen on Unix sockets in a directory of their own, so that stacks do not interfere.
    """

    def __init__(
        self,
        *,
        target: str = "",
        draft: str = "",
        canary_draft: str = "",
        models: ModelPlans | None = None,
        num_targets: int = 1,
        num_ranks: int = 1,
        listen: str = "127.0.0.1:0",
        insecure: bool = False,
        http: str = "",
        num_draft_tokens: str | None = None,
        metrics_listen: str | None = "127.0.0.1:0",
        hang_seconds: float = math.inf,
        environment: Mapping[str, str] | None = None,
        options: Mapping[str, Mapping[str, str | None]] | None = None,
        on_line: Callable[[str], None] | None = None,
        on_progress: Callable[[str, Mapping[str, Any]], None] | None = None,
    ) -> None:
        """Serve these models at `listen`, and over HTTP at `http`; "" means no draft or no gateway, port 0 any free.

        `num_targets` processes hold the target and share the sessions. Each has one of the machine's NVIDIA GPUs for
        itself, while there are any left. With several ranks, each of them has followers, which hold parts of the
        target. Instead of one target, there can be several `models`, which the coordinator loads and unloads.

        A `canary_draft` serves some sessions until it is known whether it is faster than the draft.

        If `insecure`, `listen` may be an address that other machines reach, without TLS and tokens.

        Without `num_draft_tokens`, the coordinator's own setting holds.

        Workers and coordinator serve metrics at `metrics_listen`: "" turns metrics off, None leaves their own settings.
        A process without a beat for `hang_seconds` is killed and started again. `environment` is added to the
        environment of the processes, and `options` are further options by process and name, where a flag has None. The
        second target is called "target-worker 2".
        `on_line` is called with each line that a process writes to standard error, and `on_progress` with the progress
        of each start.
        """
        self._directory = tempfile.TemporaryDirectory(prefix="specd-", ignore_cleanup_errors=True)
        sockets = Path(self._directory.name)
        metrics_options = [] if metrics_listen is None else ["--metrics-listen", metrics_listen]

        common = options or {}

        def child(
            name: str,
            *arguments: str,
            own_environment: Mapping[str, str] | None = None,
            options: Mapping[str, Mapping[str, str | None]] = common,
            progress: Callable[[str, Mapping[str, Any]], None] | None = on_progress,
        ) -> Child:
            process, *_ = name.split()
            further = {**options.get(process, {}), **options.get(name, {})}
            if process != "gateway":
                arguments = (*metrics_options, *arguments)
            for option, value in further.items():
                arguments += (f"--{option.replace('_', '-')}" + (f"={value}" if value is not None else ""),)
            command = [sys.executable, "-m", "specd", process, *arguments]
            both = {**(environment or {}), **(own_environment or {})}
            return Child(name, command, both, hang_seconds, on_line, partial(progress, name) if progress else None)

        coordinator_options = ["--listen", listen]
        self._group: WorkerGroup | None = None
        self.models: ModelProcesses | None = None
        if models is None:
            own = WorkerModels(target, draft, num_targets, num_ranks, canary=canary_draft, options=common)
            self._group = WorkerGroup(own, f"{sockets}/", child)
            addresses = ["--target", self._group.target_addresses, "--draft", self._group.draft_address]
            addresses += ["--canary-draft", self._group.canary_address] if canary_draft else []
            # At the first start, wait for the draft without limit, because it may download; the supervisor sees a
            # failure.
            coordinator_options += [*addresses, *_PATIENCE]
        else:
            coordinator_options += ["--models", str(sockets / "models.json")]
        if insecure:
            coordinator_options.append("--insecure")
        if num_draft_tokens is not None:
            coordinator_options += ["--num-draft-tokens", num_draft_tokens]
        self.coordinator = child("coordinator", *coordinator_options)
        if models is not None:

            def new_group(key: str, own: WorkerModels) -> WorkerGroup:
                def show(name: str, progress: Mapping[str, Any]) -> None:
                    assert self.models is not None
                    self.models.show_progress(key, name, progress)
                    if on_progress is not None:
                        on_progress(name, progress)

                return WorkerGroup(own, f"{sockets}/{key}-", partial(child, progress=show))

            self.models = ModelProcesses(models, sockets / "models.json", new_group, self.coordinator.tell)
            self.coordinator.on_request = self.models.take
        insecurely = ["--insecure"] if insecure else []
        self.gateway = child("gateway", "--listen", http, *insecurely) if http else None
        self._watching: dict[Child, asyncio.Task[None]] = {}

    @property
    def targets(self) -> list[Child]:
        """The target workers of the one model."""
        assert self._group is not None
        return self._group.targets

    @property
    def target(self) -> Child:
        """The first target worker."""
        return self.targets[0]

    @property
    def draft(self) -> Child | None:
        """The draft worker of the one model, if there is one."""
        return self._group.draft if self._group is not None else None

    @property
    def address(self) -> str:
        """Address of the coordinator."""
        return self.coordinator.facts["address"]

    @property
    def workers(self) -> list[Child]:
        """The workers of the one model: its draft worker, if there is one, and its target workers."""
        return self._group.children if self._group is not None else []

    @property
    def children(self) -> list[Child]:
        """The processes in the order of stopping: gateway, coordinator, and the workers of the one model."""
        return [*([self.gateway] if self.gateway is not None else []), self.coordinator, *self.workers]

    async def __aenter__(self) -> Stack:
        """Start all processes. Raises StartupError if one fails."""
        try:
            await together(self._start(self.coordinator), *([self._group.start()] if self._group is not None else []))
            if self.gateway is not None:  # it needs the coordinator's address
                self.gateway.command += ["--coordinator", from_here(self.address)]
                await self._start(self.gateway)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stop()

    async def _start(self, child: Child) -> None:
        await child.launch()
        child.keep_address()  # for the next start
        if child is self.coordinator and _PATIENCE[0] in child.command:
            # A coordinator that is restarted does not wait long for the draft.
            patience = child.command.index(_PATIENCE[0])
            del child.command[patience : patience + len(_PATIENCE)]
        self._watching[child] = asyncio.ensure_future(child.run())

    async def wait(self) -> None:
        """Wait for ever. Raises StartupError once the coordinator or the last target worker is given up."""
        await asyncio.gather(self._watching[self.coordinator], *([self._group.wait()] if self._group else []))

    def kill(self) -> None:
        """Kill all processes."""
        for child in self.children:
            child.kill()
        if self.models is not None:
            self.models.kill()

    async def _stop(self) -> None:
        for watch in self._watching.values():
            watch.cancel()
        await asyncio.gather(*self._watching.values(), return_exceptions=True)
        for child in (self.gateway, self.coordinator):
            if child is not None:
                await child.stop()
        if self._group is not None:
            await self._group.stop()
        if self.models is not None:
            await self.models.stop()
        self._directory.cleanup()

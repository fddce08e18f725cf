"""The worker processes of one model, which start and stop together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from specd.child import Child, together
from specd.machine import gpu_of
from specd.startup_error import StartupError

log = structlog.get_logger()

CANARY_NAME = "draft-worker canary"


def target_names(number: int, model: str = "") -> list[str]:
    """Return the names of the target workers of a model, which has a name only if there are several models."""
    first = f"target-worker {model}".rstrip()
    return [first, *(f"{first} {i}" for i in range(2, number + 1))]


@dataclass(frozen=True)
class WorkerModels:
    """The models of a group of workers, and how they are held.

    `num_targets` processes hold the target and share the sessions, each in `num_ranks` parts. `name` tells groups
    apart, "" if there is one group. `draft` is "" without a draft worker. `canary` is the model of a draft worker on
    trial, or "". `options` are further options by process.
    """

    target: str
    draft: str = ""
    num_targets: int = 1
    num_ranks: int = 1
    name: str = ""
    options: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    canary: str = ""


class WorkerGroup:
    """The target workers of a model and its draft worker, on Unix sockets."""

    def __init__(self, models: WorkerModels, sockets: str, new_child: Callable[..., Child]) -> None:
        """Put the sockets at `sockets` with "target" or "draft" behind it.

        `new_child` makes a child from its name, its arguments, and the environment and options of its own.
        """
        suffixes = ["", *(f"-{i}" for i in range(2, models.num_targets + 1))]
        addresses = [f"unix:{sockets}target{suffix}" for suffix in suffixes]
        self.target_addresses = ",".join(addresses)
        self.draft_address = f"unix:{sockets}draft" if models.draft else ""
        self.draft: Child | None = None
        if models.draft:
            name = f"draft-worker {models.name}".rstrip()
            arguments = ("--model", models.draft, "--listen", self.draft_address)
            self.draft = new_child(name, *arguments, options=models.options)
        self.canary_address = f"unix:{sockets}canary" if models.canary else ""
        self.canary: Child | None = None
        if models.canary:
            arguments = ("--model", models.canary, "--listen", self.canary_address)
            self.canary = new_child(CANARY_NAME, *arguments, options=models.options)
        self.targets: list[Child] = []
        names = target_names(models.num_targets, models.name)
        for i, (name, address) in enumerate(zip(names, addresses, strict=True)):
            roles = [["--listen", address]]
            if models.num_ranks > 1:
                roles[0] += ["--ranks", str(models.num_ranks), "--ranks-listen", f"{address}-ranks"]
                roles += [["--follow", f"{address}-ranks", "--rank", str(rank)] for rank in range(1, models.num_ranks)]
            first, *followers = [
                new_child(
                    f"{name} (rank {rank})" if rank else name,
                    *("--model", models.target, *role),
                    own_environment=gpu_of(i * models.num_ranks + rank, models.num_targets * models.num_ranks),
                    options=models.options,
                )
                for rank, role in enumerate(roles)
            ]
            first.followers = followers
            self.targets.append(first)
        self._watching: dict[Child, asyncio.Task[None]] = {}

    @property
    def children(self) -> list[Child]:
        """The draft worker, one on trial, then the target workers."""
        return [*(child for child in (self.draft, self.canary) if child is not None), *self.targets]

    async def start(self) -> None:
        """Start all processes, and restart those that end from now on. Raises StartupError if one does not start.

        Nothing waits for a draft on trial, or ends with it.
        """
        if self.canary is not None:
            self._watching[self.canary] = asyncio.ensure_future(_run_canary(self.canary))
        await together(*(self._start(child) for child in self.children if child is not self.canary))

    async def _start(self, child: Child) -> None:
        await child.launch()
        self._watching[child] = asyncio.ensure_future(child.run())

    async def wait(self) -> None:
        """Wait for ever. Raises StartupError once the last target worker is given up."""
        given_up = await asyncio.gather(*(self._watching[target] for target in self.targets), return_exceptions=True)
        for error in given_up:
            if isinstance(error, BaseException):
                raise error

    async def stop(self) -> None:
        """Stop all processes."""
        for watch in self._watching.values():
            watch.cancel()
        await asyncio.gather(*self._watching.values(), return_exceptions=True)
        await asyncio.gather(*(child.stop() for child in self.children))


async def _run_canary(canary: Child) -> None:
    try:
        await canary.launch()
        await canary.run()
    except (StartupError, OSError) as error:
        log.warning("the draft on trial is not there: the other one serves all sessions", error=str(error))

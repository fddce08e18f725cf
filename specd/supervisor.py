"""Supervisor of the processes: starts, restarts and stops them.

A process that ends is restarted, with a growing pause. Without the draft worker the target decodes alone, and without
the gateway clients have gRPC. A coordinator, or the last target worker, that ends repeatedly ends the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from specd.addresses import from_here
from specd.machine import gpu_of
from specd.startup_error import StartupError
from specd.supervised import BEAT_SECONDS, SUPERVISOR_FD_VARIABLE

log = structlog.get_logger()

_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 10.0
_STABLE_SECONDS = 1.0  # a process that runs for less counts as one that failed to start
_KILL_SECONDS = 15.0
_LAST_LINES_SECONDS = 1.0
# A process that has ended this many times in a row, each time before it was stable, is given up: after about 40 s.
_MOST_RESTARTS = 10
_PATIENCE = ["--draft-startup-seconds", "86400"]

# Environment without prefix caches, so that workers compute every prompt.
NO_PREFIX_CACHE = {f"SPECD_{worker}_WORKER_PREFIX_CACHE_BYTES": "0" for worker in ("DRAFT", "TARGET")}


@dataclass(eq=False)
class Child:
    """A supervised process, restarted when it ends."""

    name: str
    command: list[str]
    environment: Mapping[str, str]
    hang_seconds: float = math.inf
    # Called with each line that the process writes to standard error, which by default is the supervisor's own.
    on_line: Callable[[str], None] | None = None
    # Called with the progress of the start: a stage, and for a download the bytes.
    on_progress: Callable[[Mapping[str, Any]], None] | None = None
    facts: dict[str, str] = field(default_factory=dict)
    # Processes with further parts of the same model. They start, end and restart together with this one.
    followers: Sequence[Child] = ()
    process: asyncio.subprocess.Process | None = None
    # A child stops when this socket closes, so that it does not outlive its supervisor.
    _lifeline: asyncio.StreamWriter | None = None
    _listening: asyncio.Future[None] | None = None
    _passing_on: asyncio.Future[None] | None = None

    @property
    def pid(self) -> int:
        """Process id of the running process."""
        assert self.process is not None
        return self.process.pid

    async def start(self) -> None:
        """Start the process, with its followers, and wait until it is ready. Raises StartupError if it ends first."""
        try:
            await _together(self._start(), *(follower.start() for follower in self.followers))
        except BaseException:
            if self.followers:
                self.kill()
            raise

    async def _start(self) -> None:
        self._close_lifeline()
        ours, theirs = socket.socketpair()
        reader, self._lifeline = await asyncio.open_connection(sock=ours)
        try:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                env={**os.environ, **self.environment, SUPERVISOR_FD_VARIABLE: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE if self.on_line is not None else None,
                start_new_session=True,  # Ctrl-C goes to the supervisor, which stops its children in order
            )
        finally:
            theirs.close()
        if self.process.stderr is not None:
            self._passing_on = asyncio.ensure_future(self._pass_on(self.process.stderr))
        self.facts = await self._started(reader, self.process)
        self._listening = asyncio.ensure_future(self._end_if_silent(reader, self.process))

    async def _started(self, reader: asyncio.StreamReader, process: asyncio.subprocess.Process) -> dict[str, str]:
        """Return the facts that the process reports once it is healthy. Raises StartupError if it ends first."""
        failure = ""
        while line := await reader.readline():
            said = json.loads(line)
            if "stage" in said:
                if self.on_progress is not None:
                    self.on_progress(said)
            elif "failure" in said:
                failure = said["failure"]
            else:
                return dict(said)
        code = await process.wait()
        raise StartupError(
            f"the {self.name} did not start: {failure}"
            if failure
            else f"the {self.name} did not start (exit code {code}): see its message above"
        )

    async def _pass_on(self, stderr: asyncio.StreamReader) -> None:
        assert self.on_line is not None
        rest = b""
        while part := await stderr.read(65536):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                self.on_line(line.decode(errors="replace"))
        if rest:
            self.on_line(rest.decode(errors="replace"))

    async def run(self) -> None:
        """Restart the process whenever it ends. Raises StartupError when it has ended too often in a row.

        The back-off grows only while restarts fail: sessions wait for this process.
        """
        num_restarts = 0
        while True:
            assert self.process is not None
            began_at = time.monotonic()
            code = await self._end()
            if time.monotonic() - began_at > _STABLE_SECONDS:
                num_restarts = 0
            if num_restarts == _MOST_RESTARTS:
                log.error("a process keeps ending, giving it up", name=self.name, exit_code=code)
                raise StartupError(
                    f"the {self.name} ended {num_restarts + 1} times in a row, last with exit code {code}: see its "
                    "messages above"
                )
            backoff = min(_FIRST_BACKOFF_SECONDS * 2**num_restarts, _LONGEST_BACKOFF_SECONDS)
            num_restarts += 1
            log.error("a process ended, restarting it", name=self.name, exit_code=code, after_seconds=backoff)
            await asyncio.sleep(backoff)
            try:
                await self.start()
            except (StartupError, OSError) as error:
                log.error("the restart failed", name=self.name, error=str(error))

    async def _end(self) -> int:
        """Wait for the end of the process or of a follower, end the others, and return the exit code."""
        assert self.process is not None
        if not self.followers:
            return await self.process.wait()
        processes = [each.process for each in (self, *self.followers) if each.process is not None]
        ends = [asyncio.ensure_future(process.wait()) for process in processes]
        ended, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        self.kill()
        await asyncio.gather(*ends)
        return ended.pop().result()

    def kill(self) -> None:
        """Kill the process and its followers, if they run."""
        for child in (self, *self.followers):
            if child.process is not None and child.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.process.kill()

    async def stop(self) -> None:
        """Stop the process, and kill it if it does not stop. Its followers stop with it."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(_KILL_SECONDS):
                    await self.process.wait()
            except TimeoutError:
                log.error("a process has not stopped in time, killing it", name=self.name)
                self.process.kill()
                await self.process.wait()
        self._close_lifeline()
        if self._passing_on is not None:
            await asyncio.wait({self._passing_on}, timeout=_LAST_LINES_SECONDS)
        for follower in self.followers:
            await follower.stop()

    async def _end_if_silent(self, reader: asyncio.StreamReader, process: asyncio.subprocess.Process) -> None:
        """Kill the process when its beats stop, because it hangs. Its sessions continue with the next process.

        It counts missed beats, not seconds, so that a pause of the whole machine kills no process.
        """
        num_missed = 0
        beat = asyncio.ensure_future(reader.readline())
        try:
            while num_missed * BEAT_SECONDS < self.hang_seconds:
                has_come, _ = await asyncio.wait({beat}, timeout=BEAT_SECONDS)
                num_missed = 0 if has_come else num_missed + 1
                if has_come:
                    if beat.exception() or not beat.result():
                        return  # the process has ended
                    beat = asyncio.ensure_future(reader.readline())
        finally:
            beat.cancel()
        log.error("a process hangs, killing it", name=self.name, silent_seconds=num_missed * BEAT_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    def keep_address(self) -> None:
        """Make the process listen at its present address after a restart too."""
        self.command[self.command.index("--listen") + 1] = self.facts["address"]

    def _close_lifeline(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            self._listening = None
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None


async def _together(*starts: Coroutine[Any, Any, None]) -> None:
    """Wait for all starts. If one fails, cancel the others, and raise its error."""
    starting = [*map(asyncio.ensure_future, starts)]
    try:
        await asyncio.gather(*starting)
    except BaseException:
        for start in starting:
            start.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        raise


def target_names(number: int) -> list[str]:
    """Return the names of the target workers of a Stack."""
    return ["target-worker", *(f"target-worker {i}" for i in range(2, number + 1))]


class Stack:
    """Draft worker, target workers, coordinator and, if wanted, gateway on this host, as an async context manager.

    The workers listen on Unix sockets in a directory of their own, so that stacks do not interfere.
    """

    def __init__(
        self,
        *,
        target: str,
        draft: str,
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
        target.

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

        def child(name: str, *arguments: str, own_environment: Mapping[str, str] | None = None) -> Child:
            process, *_ = name.split()
            further = {**(options or {}).get(process, {}), **(options or {}).get(name, {})}
            for option, value in further.items():
                arguments += (f"--{option.replace('_', '-')}" + (f"={value}" if value is not None else ""),)
            command = [sys.executable, "-m", "specd", process, *arguments]
            progress = partial(on_progress, name) if on_progress is not None else None
            both = {**(environment or {}), **(own_environment or {})}
            return Child(name, command, both, hang_seconds, on_line, progress)

        names = target_names(num_targets)
        target_addresses = [f"unix:{sockets / 'target'}{f'-{i}' if i > 1 else ''}" for i in range(1, num_targets + 1)]
        draft_address = f"unix:{sockets / 'draft'}" if draft else ""
        coordinator_options = ["--target", ",".join(target_addresses), "--draft", draft_address, "--listen", listen]
        # At the first start, wait for the draft without limit, because it may download; the supervisor sees a failure.
        coordinator_options += _PATIENCE
        if insecure:
            coordinator_options.append("--insecure")
        if num_draft_tokens is not None:
            coordinator_options += ["--num-draft-tokens", num_draft_tokens]
        self.coordinator = child("coordinator", *metrics_options, *coordinator_options)
        self.draft = (
            child("draft-worker", *metrics_options, "--model", draft, "--listen", draft_address) if draft else None
        )
        self.targets = []
        for i, (name, address) in enumerate(zip(names, target_addresses, strict=True)):
            roles = [["--listen", address]]
            if num_ranks > 1:
                roles[0] += ["--ranks", str(num_ranks), "--ranks-listen", f"{address}-ranks"]
                roles += [["--follow", f"{address}-ranks", "--rank", str(rank)] for rank in range(1, num_ranks)]
            first, *followers = [
                child(
                    f"{name} (rank {rank})" if rank else name,
                    *(*metrics_options, "--model", target, *role),
                    own_environment=gpu_of(i * num_ranks + rank, num_targets * num_ranks),
                )
                for rank, role in enumerate(roles)
            ]
            first.followers = followers
            self.targets.append(first)
        insecurely = ["--insecure"] if insecure else []
        self.gateway = child("gateway", "--listen", http, *insecurely) if http else None
        self._watching: dict[Child, asyncio.Task[None]] = {}

    @property
    def target(self) -> Child:
        """The first target worker."""
        return self.targets[0]

    @property
    def address(self) -> str:
        """Address of the coordinator."""
        return self.coordinator.facts["address"]

    @property
    def children(self) -> list[Child]:
        """The processes in the order of stopping: gateway, coordinator, draft worker, target workers."""
        children = (self.gateway, self.coordinator, self.draft, *self.targets)
        return [child for child in children if child is not None]

    async def __aenter__(self) -> Stack:
        """Start all processes. Raises StartupError if one fails."""
        try:
            await _together(*(self._start(child) for child in self.children if child is not self.gateway))
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
        await child.start()
        if child.on_progress is not None:
            child.on_progress({"stage": "ready"})
        if child is self.coordinator:
            # A restarted coordinator keeps its address, and does not wait long for the draft.
            child.keep_address()
            patience = child.command.index(_PATIENCE[0])
            del child.command[patience : patience + len(_PATIENCE)]
        elif child is self.gateway:
            child.keep_address()
        self._watching[child] = asyncio.ensure_future(child.run())

    async def wait(self) -> None:
        """Wait for ever. Raises StartupError once the coordinator or the last target worker is given up."""
        await asyncio.gather(self._watching[self.coordinator], self._wait_for_targets())

    async def _wait_for_targets(self) -> None:
        given_up = await asyncio.gather(*(self._watching[target] for target in self.targets), return_exceptions=True)
        for error in given_up:
            if isinstance(error, BaseException):
                raise error

    def kill(self) -> None:
        """Kill all processes."""
        for child in self.children:
            child.kill()

    async def _stop(self) -> None:
        for watch in self._watching.values():
            watch.cancel()
        await asyncio.gather(*self._watching.values(), return_exceptions=True)
        for child in self.children:
            await child.stop()
        self._directory.cleanup()

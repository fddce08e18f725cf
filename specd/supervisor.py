"""Starts the three processes, keeps them running, and stops them in order."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from specd.errors import StartupError
from specd.server import SUPERVISOR_FD_VARIABLE

log = structlog.get_logger()

_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 10.0
_KILL_SECONDS = 15.0


@dataclass
class Child:
    """One supervised process, restarted when it ends by itself."""

    name: str
    command: list[str]
    environment: Mapping[str, str]
    facts: dict[str, str] = field(default_factory=dict)
    restarts: int = 0
    process: asyncio.subprocess.Process | None = None
    # Open as long as the supervisor lives: a child that sees it closed stops.
    _lifeline: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int:
        """Process id of the running process."""
        assert self.process is not None
        return self.process.pid

    async def start(self) -> None:
        """Start the process and wait until it is ready. Raises StartupError when it ends before that."""
        self._close_lifeline()
        ours, theirs = socket.socketpair()
        reader, self._lifeline = await asyncio.open_connection(sock=ours)
        try:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                env={**os.environ, **self.environment, SUPERVISOR_FD_VARIABLE: str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the supervisor's, which stops its children in order
            )
        finally:
            theirs.close()
        line = await reader.readline()
        if not line:
            code = await self.process.wait()
            raise StartupError(f"the {self.name} did not start (exit code {code}): see its message above")
        self.facts = json.loads(line)

    async def run(self) -> None:
        """Restart the process whenever it ends, for ever.

        Only restarts that fail are put off longer and longer: for one that was ready, sessions wait.
        """
        backoff = _FIRST_BACKOFF_SECONDS
        while True:
            assert self.process is not None
            code = await self.process.wait()
            log.error("a process ended, starting it again", name=self.name, exit_code=code, after_seconds=backoff)
            await asyncio.sleep(backoff)
            self.restarts += 1
            try:
                await self.start()
                backoff = _FIRST_BACKOFF_SECONDS
            except StartupError as error:
                log.error("the restart failed", name=self.name, error=str(error))
                backoff = min(2 * backoff, _LONGEST_BACKOFF_SECONDS)

    async def stop(self) -> None:
        """Ask the process to stop, and make it."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(_KILL_SECONDS):
                    await self.process.wait()
            except TimeoutError:
                log.error("a process does not stop: killing it", name=self.name)
                self.process.kill()
                await self.process.wait()
        self._close_lifeline()

    def _close_lifeline(self) -> None:
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None


class Stack:
    """Draft worker, target worker and coordinator on this host, as an async context manager.

    The workers listen on Unix sockets in a directory of their own, so that several stacks never meet.
    """

    def __init__(
        self,
        *,
        target: str,
        draft: str,
        listen: str = "127.0.0.1:0",
        num_draft_tokens: int | None = None,
        metrics_ports: tuple[int, int, int] | None = (0, 0, 0),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Serve these models (a draft of "" means none) at `listen`; port 0 is any free one.

        `metrics_ports` are those of coordinator, draft and target; `environment` is added to that of the processes.
        """
        self._directory = tempfile.TemporaryDirectory(prefix="specd-", ignore_cleanup_errors=True)
        sockets = Path(self._directory.name)
        metrics = [f"127.0.0.1:{port}" for port in metrics_ports] if metrics_ports is not None else ["", "", ""]

        def child(name: str, metrics_listen: str, *options: str) -> Child:
            command = [sys.executable, "-m", "specd", name, "--metrics-listen", metrics_listen, *options]
            return Child(name, command, environment or {})

        target_address, draft_address = f"unix:{sockets / 'target'}", f"unix:{sockets / 'draft'}" if draft else ""
        coordinator_options = ["--target", target_address, "--draft", draft_address, "--listen", listen]
        # A draft that cannot start is seen here; one that downloads for an hour is worth waiting for.
        coordinator_options += ["--draft-startup-seconds", "86400"]
        if num_draft_tokens is not None:
            coordinator_options += ["--num-draft-tokens", str(num_draft_tokens)]
        self.coordinator = child("coordinator", metrics[0], *coordinator_options)
        self.draft = child("draft-worker", metrics[1], "--model", draft, "--listen", draft_address) if draft else None
        self.target = child("target-worker", metrics[2], "--model", target, "--listen", target_address)
        self._watching: list[asyncio.Task[None]] = []

    @property
    def address(self) -> str:
        """Where clients reach the coordinator."""
        return self.coordinator.facts["address"]

    @property
    def children(self) -> list[Child]:
        """The processes, in the order in which they stop: who calls before who is called."""
        return [child for child in (self.coordinator, self.draft, self.target) if child is not None]

    async def __aenter__(self) -> Stack:
        """Start all processes. Raises StartupError when one of them cannot."""
        starting = [asyncio.ensure_future(child.start()) for child in self.children]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for start in starting:
                start.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self._stop()
            raise
        # A restarted coordinator must come back where its clients look for it.
        self.coordinator.command[self.coordinator.command.index("--listen") + 1] = self.address
        self._watching = [asyncio.ensure_future(child.run()) for child in self.children]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for watch in self._watching:
            watch.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await self._stop()

    def kill(self) -> None:
        """End all processes at once."""
        for child in self.children:
            if child.process is not None and child.process.returncode is None:
                child.process.kill()

    async def _stop(self) -> None:
        for child in self.children:
            await child.stop()
        self._directory.cleanup()

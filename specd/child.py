"""A process of a stack: started, watched, restarted when it ends or hangs, and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from specd.startup_error import StartupError
from specd.supervised import BEAT_SECONDS, SUPERVISOR_FD_VARIABLE

log = structlog.get_logger()

_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 10.0
_STABLE_SECONDS = 1.0  # a process that runs for less counts as one that failed to start
_KILL_SECONDS = 15.0
_LAST_LINES_SECONDS = 1.0
_LAST_STEPS_SECONDS = 2.0  # of a follower, after the end of the process that it follows
# A process that has ended this many times in a row, each time before it was stable, is given up: after about 40 s.
_MOST_RESTARTS = 10


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
    # Called with each request of the process to its supervisor, from its start on.
    on_request: Callable[[Mapping[str, Any]], None] | None = None
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
            await together(self._start(), *(follower.start() for follower in self.followers))
        except BaseException:
            if self.followers:
                self.kill()
            raise

    async def launch(self) -> None:
        """Start the process for the first time: the last stage of its progress is "ready". Raises StartupError."""
        await self.start()
        if self.on_progress is not None:
            self.on_progress({"stage": "ready"})

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
            elif "request" in said:
                self._take_request(said)
            else:
                return dict(said)
        code = await process.wait()
        raise StartupError(
            f"the {self.name} did not start: {failure}"
            if failure
            else f"the {self.name} did not start (exit code {code}): see its message above"
        )

    def _take_request(self, said: Mapping[str, Any]) -> None:
        if self.on_request is not None:
            self.on_request(said)

    def tell(self, **message: Any) -> None:
        """Send a message to the process, if it runs."""
        if self._lifeline is not None and not self._lifeline.is_closing():
            self._lifeline.write(json.dumps(message).encode() + b"\n")

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

    async def stop(self, *, ends_by_itself: bool = False) -> None:
        """Stop the process, and kill it if it does not stop. Its followers end by themselves then."""
        if ends_by_itself and self.process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), _LAST_STEPS_SECONDS)
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
            await follower.stop(ends_by_itself=True)

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
                    if beat.exception() or not (line := beat.result()):
                        return  # the process has ended
                    if line.strip():
                        self._take_request(json.loads(line))
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


async def together(*starts: Coroutine[Any, Any, None]) -> None:
    """Wait for the starts of processes. If one fails, cancel the others, and raise its error."""
    starting = [*map(asyncio.ensure_future, starts)]
    try:
        await asyncio.gather(*starting)
    except BaseException:
        for start in starting:
            start.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        raise

"""Real specd processes, seen as their user sees them: command lines, logs, exit codes and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from specd.child import Child
from specd.supervisor import Stack

# An awaited event comes within seconds, or within this time on a busy machine.
PATIENCE_SECONDS = 120

_COMMAND = [sys.executable, "-m", "specd"]
_HERE = Path(__file__).parent  # where no specd.toml lies


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without its settings of specd, and with no way to the Hugging Face hub."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SPECD_")}
    return {**inherited, "HF_HUB_OFFLINE": "1", "COLUMNS": "80", **variables}


def run_specd(
    *arguments: str,
    stdin: bytes = b"",
    directory: Path = _HERE,
    timeout_seconds: float = PATIENCE_SECONDS,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run `specd` to its end."""
    command = [*_COMMAND, *arguments]
    done = subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        env=environment(**variables),
        cwd=directory,
        timeout=timeout_seconds,
        check=False,
    )
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


class RunningSpecd:
    """A `specd` command that runs, with its log."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.pid = process.pid
        self.lines: list[str] = []

    async def next_line(self, condition: Callable[[str], bool]) -> str:
        """Return the next line of standard error, after the last one asked for, that fulfils a condition."""
        assert self.process.stderr is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            while line := (await self.process.stderr.readline()).decode():
                self.lines.append(line)
                if condition(line):
                    return line.rstrip()
        raise AssertionError(f"the process ended without the line waited for: {''.join(self.lines)}")

    async def next_event(self, event: str, **fields: str) -> dict[str, Any]:
        """Return the next event in the log that has this name and these fields."""

        def fits(line: str) -> bool:
            return line.startswith("{") and {"event": event, **fields}.items() <= json.loads(line).items()

        entry: dict[str, Any] = json.loads(await self.next_line(fits))
        return entry

    async def exit_code(self) -> int:
        """Wait for the end, and keep the rest of the log."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            _, rest = await self.process.communicate()
        self.lines += rest.decode().splitlines(keepends=True)
        assert self.process.returncode is not None
        return self.process.returncode

    async def stop(self, signal_number: int) -> int:
        """Send a signal, to the whole process group as a terminal does, and return the exit code that follows."""
        os.killpg(self.pid, signal_number)
        return await self.exit_code()


@contextlib.asynccontextmanager
async def start_specd(*arguments: str, **variables: str) -> AsyncIterator[RunningSpecd]:
    """Run `specd` for the length of a block."""
    process = await asyncio.create_subprocess_exec(
        *_COMMAND,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=environment(**variables),
        cwd=_HERE,
        start_new_session=True,  # not in the process group of the tests
    )
    running = RunningSpecd(process)
    try:
        yield running
    finally:
        if process.returncode is None:
            process.terminate()
        await running.exit_code()


def complaint(stderr: str) -> str:
    """Return the one line on standard error that is not log: what the command has to say to its user."""
    # gRPC's core writes its own log lines, such as "E1120 08:13:06.841855 9641 add_port.cc:83] ...".
    others = [line for line in stderr.splitlines() if not line.startswith("{") and "add_port.cc" not in line]
    assert len(others) == 1, f"not one line, but {len(others)}:\n{stderr}"
    assert others[0].startswith("specd: ")
    return others[0]


def draft_of(stack: Stack) -> Child:
    """Return the draft worker of a stack that has one."""
    assert stack.draft is not None
    return stack.draft


def resident_mib(pid: int) -> float:
    """Return the memory that a process takes now, on Linux."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def own_memory_mib(pid: int) -> float:
    """Return the memory that a process has asked for and holds now, on Linux.

    Pages of files, such as libraries, do not count: the system takes and gives them back as it pleases.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(line.split()[1]) for line in status.splitlines() if line.startswith(("RssAnon:", "VmSwap:"))) / 1024


def processes_mentioning(text: str) -> dict[int, str]:
    """Return the running processes that have a text in their command line."""
    return {pid: command for pid, command in _command_lines() if text in command}


def _command_lines() -> Iterator[tuple[int, str]]:
    if not Path("/proc/self/cmdline").exists():  # macOS, which has `ps`; a slim container has not
        listing = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,args="], capture_output=True, text=True, check=True)
        rows = (line.split(maxsplit=1) for line in listing.stdout.splitlines())
        yield from ((int(row[0]), row[1]) for row in rows if len(row) == 2)
        return
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            yield (
                int(directory.name),
                (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"),
            )


def scraped_address(process: Child) -> str:
    """Return where a process answers scrapes; the gateway does where it answers requests."""
    return str(process.facts.get("metrics_address") or process.facts["address"])


def read_metrics_text(process: Child) -> str:
    """Return what a process answers to a scrape."""
    connection = http.client.HTTPConnection(scraped_address(process), timeout=PATIENCE_SECONDS)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()


def read_metrics(process: Child) -> list[Sample]:
    """Return all samples of a process's metrics."""
    families = text_string_to_metric_families(read_metrics_text(process))
    return [sample for family in families for sample in family.samples]


def read_metric(process: Child, name: str, **labels: str) -> float:
    """Return a sample of a process's metrics."""
    return next(s.value for s in read_metrics(process) if s.name == name and s.labels == labels)


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for something in another process that nothing announces."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def wait_until_idle(stack: Stack) -> None:
    """Wait until no process of a stack holds a session; if one leaks, this times out."""
    draft = draft_of(stack)
    await eventually(lambda: read_metric(stack.coordinator, "specd_active_sessions") == 0)
    await eventually(lambda: read_metric(draft, "specd_worker_active_sessions") == 0)
    await eventually(lambda: read_metric(stack.target, "specd_worker_active_sessions") == 0)

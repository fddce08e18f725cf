"""A `specd up` with its log in a file, and what is wrong with the log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.processes import environment, eventually, processes_mentioning


@dataclass
class Log:
    """The logs of the processes under `specd up` since they are ready."""

    lines: list[str]
    seconds: float

    def problems(self, num_messages: int) -> Iterator[str]:
        """Yield what is wrong: lines that are no event, or long, or more of them than there may be."""
        kinds: Counter[tuple[str, ...]] = Counter()
        for line in self.lines:
            entry = json.loads(line) if line.startswith("{") else {}
            if not entry or len(line) > 2000 or "exception" in entry:
                yield f"a line that should not be: {line[:3000]}"
            if entry.get("level") != "info" or "reason" in entry:
                kinds[entry.get("process", ""), entry.get("event", ""), entry.get("reason", "")] += 1
        if len(self.lines) > num_messages:
            yield f"{len(self.lines)} lines for {num_messages} messages"
        most = 10 * (self.seconds / 10 + 2)
        yield from (f"{kind}: {count} lines in {self.seconds:.0f} s" for kind, count in kinds.items() if count > most)


@dataclass
class SpecdUp:
    """A running `specd up` with a log."""

    directory: Path
    log: Path
    pids: set[int] = field(default_factory=set)
    started_at: float = 0.0

    @property
    def url(self) -> str:
        """The gateway's address."""
        (found,) = re.findall(r"OpenAI's API: (http://\S+)/v1", self.log.read_text())
        return str(found)

    @property
    def addresses(self) -> dict[str, str]:
        """The addresses of the processes."""
        (sockets,) = self.directory.glob("specd-*")
        return {"coordinator": f"unix:{self.directory}/coordinator"} | {
            name: f"unix:{sockets / name}" for name in ("draft", "target")
        }

    def lines(self) -> list[str]:
        """Return the log since the processes are ready."""
        return self.log.read_text().splitlines()[self._num_first_lines :]

    def mark(self) -> None:
        """Record the present state."""
        self._num_first_lines = len(self.log.read_text().splitlines())
        self.pids = set(processes_mentioning(str(self.directory)))
        self.started_at = time.monotonic()

    def read_log(self) -> Log:
        """Return the log since the mark."""
        return Log(self.lines(), time.monotonic() - self.started_at)


@contextlib.asynccontextmanager
async def running_specd(directory: Path, **variables: str) -> AsyncIterator[SpecdUp]:
    """Run `specd up` on the embedded pair with a gateway, sockets and log in a directory, and these variables."""
    specd = SpecdUp(directory, directory / "log")
    with specd.log.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "specd", "up", "--listen", f"unix:{directory}/coordinator", "--http", "127.0.0.1:0"),
            "--no-metrics",
            stderr=log,
            env=environment(TMPDIR=str(directory), SPECD_LOG_FORMAT="json", **variables),
            start_new_session=True,
        )
        try:
            await eventually(lambda: "try: specd generate" in specd.log.read_text())
            specd.mark()
            yield specd
        finally:
            process.terminate()
            await process.wait()

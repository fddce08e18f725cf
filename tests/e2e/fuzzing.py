"""Random and mutated messages to every method of the three processes: `python -m tests.e2e.fuzzing --help`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specd.rpc.client import Client
from specd.v1 import generation_pb2
from tests.e2e.fuzz_requests import METHODS, PROMPT, RequestGenerator
from tests.e2e.processes import environment, eventually, processes_mentioning

CONNECTIONS = 8  # to each process
CALLS = 48  # at a time, of all processes
_PATIENCE_SECONDS = 120
_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]  # else all channels to an address share a connection

# UNAVAILABLE is not one of them: nothing is away, and nothing stops.
EXPECTED = {"OK", "CANCELLED", "INVALID_ARGUMENT", "NOT_FOUND", "ABORTED", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"}
EXPECTED_OF_UNKNOWN = {"UNIMPLEMENTED", "CANCELLED"}

_MOST_PROBLEMS = 30

# What grpc.aio's client makes of a status that came while it was writing.
_LOST_STATUS = "Internal error from Core"


@dataclass
class Outcomes:
    """What came of the messages."""

    num_messages: int = 0
    codes: Counter[tuple[str, str]] = field(default_factory=Counter)  # by method and code
    unexpected: list[str] = field(default_factory=list)
    slowest_health_check: dict[str, float] = field(default_factory=dict)  # seconds, by process


class Fuzzer:
    """Sends messages over many connections, and notes how the calls end.

    A call's requests depend on the seed and the call's number alone, but for the ids of sessions that there are.
    """

    def __init__(self, addresses: dict[str, str], seed: int) -> None:
        self.result = Outcomes()
        self._addresses = addresses
        self._seed = seed
        self._numbers = count()
        self._session_ids = deque(["nosuch"], maxlen=20)

    async def send(self, num_messages: int) -> None:
        """Send so many messages, in calls of one or several."""
        async with contextlib.AsyncExitStack() as connections:
            channels = {
                process: [
                    await connections.enter_async_context(grpc.aio.insecure_channel(address, options=_OPTIONS))
                    for _ in range(CONNECTIONS)
                ]
                for process, address in self._addresses.items()
            }

            async def keep_calling() -> None:
                while self.result.num_messages < num_messages:
                    await self._call(channels)

            watching = [
                asyncio.create_task(self._check_health(process, owned[0])) for process, owned in channels.items()
            ]
            async with asyncio.TaskGroup() as callers:
                for _ in range(CALLS):
                    callers.create_task(keep_calling())
            for watch in watching:
                watch.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    async def _check_health(self, process: str, channel: grpc.aio.Channel) -> None:
        """Note how long a health check takes at most: a message can keep a process busy."""
        health: Any = health_pb2_grpc.HealthStub(channel)
        slowest = self.result.slowest_health_check
        while True:
            asked_at = time.monotonic()
            await health.Check(health_pb2.HealthCheckRequest())
            slowest[process] = max(slowest.get(process, 0.0), time.monotonic() - asked_at)
            await asyncio.sleep(0.2)

    async def _call(self, channels: Mapping[str, Sequence[Any]]) -> None:
        generator = RequestGenerator(f"{self._seed} {next(self._numbers)}", self._session_ids)
        pick, chance = generator.random.choice, generator.random.random
        process, method = pick(METHODS)
        is_unknown = chance() < 0.01
        name = f"/{method.containing_service.full_name}/{method.name}"
        path, channel = name + "x" * is_unknown, pick(channels[process])
        num_requests = pick([1, 1, 2, 3, 6]) if method.client_streaming else 1
        requests = [generator.request(method) for _ in range(num_requests)]
        self.result.num_messages += num_requests
        call: Any
        if method.client_streaming:
            call = channel.stream_stream(path)(iter(requests), timeout=_PATIENCE_SECONDS)
        else:
            call = channel.unary_stream(path)(requests[0], timeout=_PATIENCE_SECONDS)
        # A watch does not end, a generation can be long, and clients do go away.
        most = 0 if chance() < 0.02 else {"Watch": 1, "Generate": 2}.get(method.name, 20)
        try:
            for _ in range(most):
                if (answer := await call.read()) is grpc.aio.EOF:
                    break
                if method.name == "Generate":
                    self._session_ids.append(generation_pb2.GenerateResponse.FromString(answer).session_id)
            else:
                call.cancel()
            code, details = await call.code(), await call.details()
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details()
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
            code, details = grpc.StatusCode.CANCELLED, ""
        outcome = code.name
        if code is grpc.StatusCode.INTERNAL and details == _LOST_STATUS:
            outcome = "LOST_STATUS"
        elif outcome not in (EXPECTED_OF_UNKNOWN if is_unknown else EXPECTED):
            self.result.unexpected.append(f"{process} {name}: {outcome}: {details}: {[r[:200] for r in requests]}")
        self.result.codes[name, outcome] += 1


@dataclass
class Log:
    """What three processes under `specd up` logged since they are ready."""

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
    def addresses(self) -> dict[str, str]:
        """Where the processes listen."""
        (sockets,) = self.directory.glob("specd-*")
        return {"coordinator": f"unix:{self.directory}/coordinator"} | {
            name: f"unix:{sockets / name}" for name in ("draft", "target")
        }

    def lines(self) -> list[str]:
        """Return the log since the processes are ready."""
        return self.log.read_text().splitlines()[self._num_first_lines :]

    def mark(self) -> None:
        """Take note of what there is now."""
        self._num_first_lines = len(self.log.read_text().splitlines())
        self.pids = set(processes_mentioning(str(self.directory)))
        self.started_at = time.monotonic()

    def read_log(self) -> Log:
        """Return the log since the mark."""
        return Log(self.lines(), time.monotonic() - self.started_at)


@contextlib.asynccontextmanager
async def running_specd(directory: Path) -> AsyncIterator[SpecdUp]:
    """Run `specd up` on the embedded pair, with sockets and log in a directory."""
    specd = SpecdUp(directory, directory / "log")
    with specd.log.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "specd", "up", "--listen", f"unix:{directory}/coordinator", "--no-metrics"),
            stderr=log,
            env=environment(TMPDIR=str(directory), SPECD_LOG_FORMAT="json"),
            start_new_session=True,
        )
        try:
            await eventually(lambda: "try: specd generate" in specd.log.read_text())
            specd.mark()
            yield specd
        finally:
            process.terminate()
            await process.wait()


async def tokens_of(specd: SpecdUp) -> list[int]:
    """Return a completion, which must not depend on what others send."""
    async with Client(specd.addresses["coordinator"]) as client:
        return [token.id async for r in client.generate(PROMPT, max_tokens=32) for token in r.tokens]


async def fuzz(directory: Path, seed: int, num_messages: int) -> tuple[Outcomes, list[str]]:
    """Send messages to processes of their own; return what came of them, and what is wrong with the processes."""
    async with running_specd(directory) as specd:
        before = await tokens_of(specd)
        fuzzer = Fuzzer(specd.addresses, seed)
        await fuzzer.send(num_messages)
        problems = fuzzer.result.unexpected
        if await tokens_of(specd) != before:
            problems.append("other tokens than before")
        if set(processes_mentioning(str(directory))) != specd.pids:
            problems.append("a process died")
        problems += specd.read_log().problems(fuzzer.result.num_messages)
    return fuzzer.result, problems


def main() -> None:
    """Fuzz from the command line; exit with 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000, help="How many messages to send. (default: 100000)")
    parser.add_argument("--seed", type=int, default=None, help="Repeats the messages of an earlier run.")
    options = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    began_at = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        result, problems = asyncio.run(fuzz(Path(directory), seed, options.messages))
        num_lines = len((Path(directory) / "log").read_text().splitlines())
    for method in sorted({method for method, _ in result.codes}):
        counts = {code: count for (name, code), count in sorted(result.codes.items()) if name == method}
        print(f"{method:62} {'  '.join(f'{code} {count}' for code, count in counts.items())}")
    calls = sum(result.codes.values())
    seconds = time.monotonic() - began_at
    print(f"{result.num_messages} messages, {calls} calls, {num_lines} lines in the log, {seconds:.0f} s")
    print("slowest health check:", ", ".join(f"{p} {t:.1f} s" for p, t in result.slowest_health_check.items()))
    for problem in problems[:_MOST_PROBLEMS]:
        print(f"WRONG: {problem}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()

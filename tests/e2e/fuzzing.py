"""Random and mutated messages to every RPC and to the gateway: `python -m tests.e2e.fuzzing --help`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import httpx2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specd.v1 import generation_pb2
from tests.e2e import http_fuzzing
from tests.e2e.fuzz_requests import METHODS, PROMPT, RequestGenerator
from tests.e2e.logged_specd import SpecdUp, running_specd
from tests.e2e.memory import lasting_growth
from tests.e2e.processes import processes_mentioning, resident_mib
from tests.raw_client import RawClient

CONNECTIONS = 8  # to each process
CALLS = 48  # at a time, of all processes
_TO_GATEWAY = 0.1
_PATIENCE_SECONDS = 120
_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]  # else all channels to an address share a connection

# Prefix caches that are full soon: what still grows then is kept for good.
_VARIABLES = {f"SPECD_{worker}_WORKER_PREFIX_CACHE_BYTES": "64MiB" for worker in ("DRAFT", "TARGET")}

# UNAVAILABLE is not one of them: nothing is away, and nothing stops.
EXPECTED = {"OK", "CANCELLED", "INVALID_ARGUMENT", "NOT_FOUND", "ABORTED", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"}
EXPECTED_OF_UNKNOWN = {"UNIMPLEMENTED", "CANCELLED"}

_MOST_PROBLEMS = 30
_SECONDS_BETWEEN_SAMPLES = 2.0
_FEWEST_SAMPLES = 40
_MOST_GROWTH_MIB = 128

# What grpc.aio's client makes of a status that came while it was writing.
_LOST_STATUS = "Internal error from Core"


@dataclass
class Outcomes:
    """The outcome of the messages."""

    num_messages: int = 0
    codes: Counter[tuple[str, str]] = field(default_factory=Counter)  # by method and code
    unexpected: list[str] = field(default_factory=list)
    slowest_health_check: dict[str, float] = field(default_factory=dict)  # seconds, by process
    memory_mib: list[dict[int, float]] = field(default_factory=list)  # by process id, now and then
    seconds: float = 0.0

    def growth_mib(self) -> float | None:
        """Return by how much a process grew at most; None for too few samples."""
        if len(self.memory_mib) < _FEWEST_SAMPLES:
            return None
        return max(lasting_growth([each.get(pid, 0.0) for each in self.memory_mib]) for pid in self.memory_mib[0])


class Fuzzer:
    """Sends messages over many connections, and notes how the calls end.

    A call's requests depend on the seed and the call's number alone, but for the ids of sessions that there are. One in
    ten goes to the gateway.
    """

    def __init__(self, addresses: dict[str, str], url: str, seed: int) -> None:
        self.result = Outcomes()
        self._addresses = addresses
        self._url = url
        self._seed = seed
        self._numbers = count()
        self._session_ids = deque(["nosuch"], maxlen=20)

    async def send(self, num_messages: int) -> None:
        """Send this number of messages, in calls of one or several."""
        async with contextlib.AsyncExitStack() as connections:
            channels = {
                process: [
                    await connections.enter_async_context(grpc.aio.insecure_channel(address, options=_OPTIONS))
                    for _ in range(CONNECTIONS)
                ]
                for process, address in self._addresses.items()
            }
            http = await connections.enter_async_context(
                httpx2.AsyncClient(base_url=self._url, timeout=_PATIENCE_SECONDS)
            )
            began_at = time.monotonic()

            async def keep_calling() -> None:
                while self.result.num_messages < num_messages:
                    generator = RequestGenerator(f"{self._seed} {next(self._numbers)}", self._session_ids)
                    if generator.random.random() < _TO_GATEWAY:
                        num_sent = await self._ask_gateway(generator, http)
                    else:
                        num_sent = await self._call(generator, channels)
                    self.result.num_messages += num_sent  # after the wait, in which others add theirs

            watching = [
                asyncio.create_task(self._check_health(process, owned[0])) for process, owned in channels.items()
            ]
            async with asyncio.TaskGroup() as callers:
                for _ in range(CALLS):
                    callers.create_task(keep_calling())
            for watch in watching:
                watch.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            self.result.seconds = time.monotonic() - began_at

    async def _check_health(self, process: str, channel: grpc.aio.Channel) -> None:
        """Note checks that fail, and how long one takes at most: a message can keep a process busy."""
        health: Any = health_pb2_grpc.HealthStub(channel)
        slowest = self.result.slowest_health_check
        while True:
            asked_at = time.monotonic()
            try:
                answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=_PATIENCE_SECONDS)
            except grpc.aio.AioRpcError as error:
                self.result.unexpected.append(f"{process} health: {error.code().name}: {error.details()}")
            else:
                if answer.status != health_pb2.HealthCheckResponse.SERVING:
                    self.result.unexpected.append(f"{process} health: {answer.status}")
            slowest[process] = max(slowest.get(process, 0.0), time.monotonic() - asked_at)
            await asyncio.sleep(0.2)

    async def _ask_gateway(self, generator: RequestGenerator, client: httpx2.AsyncClient) -> int:
        try:
            route, _, outcome = (await http_fuzzing.send(client, generator)).rpartition(" ")
        except (httpx2.HTTPError, AssertionError, ValueError, LookupError, TypeError) as error:
            self.result.unexpected.append(f"gateway: {error!r}")
            return 1
        if outcome.isdigit() and int(outcome) not in http_fuzzing.EXPECTED_STATUSES:
            self.result.unexpected.append(f"gateway {route}: {outcome}")
        self.result.codes[route, outcome] += 1
        return 1

    async def _call(self, generator: RequestGenerator, channels: Mapping[str, Sequence[Any]]) -> int:
        pick, chance = generator.random.choice, generator.random.random
        process, method = pick(METHODS)
        is_unknown = chance() < 0.01
        name = f"/{method.containing_service.full_name}/{method.name}"
        path, channel = name + "x" * is_unknown, pick(channels[process])
        num_requests = pick([1, 1, 2, 3, 6]) if method.client_streaming else 1
        requests = [generator.request(method) for _ in range(num_requests)]
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
        return num_requests


async def watch_memory(pids: Collection[int], outcomes: Outcomes) -> None:
    """Note what the processes take, every few seconds; on Linux."""
    while sys.platform == "linux":
        with contextlib.suppress(OSError):  # one has ended, which is noted elsewhere
            outcomes.memory_mib.append({pid: resident_mib(pid) for pid in pids})
        await asyncio.sleep(_SECONDS_BETWEEN_SAMPLES)


async def tokens_of(specd: SpecdUp) -> list[int]:
    """Return a completion, which must not depend on what others send."""
    async with RawClient(specd.addresses["coordinator"]) as client:
        return [token.id async for r in client.generate(PROMPT, max_tokens=32) for token in r.tokens]


async def fuzz(directory: Path, seed: int, num_messages: int) -> tuple[Outcomes, list[str]]:
    """Send messages to processes of their own; return what came of them, and what is wrong with the processes."""
    async with running_specd(directory, **_VARIABLES) as specd:
        before = await tokens_of(specd)
        fuzzer = Fuzzer(specd.addresses, specd.url, seed)
        watching = asyncio.ensure_future(watch_memory(specd.pids, fuzzer.result))
        await fuzzer.send(num_messages)
        watching.cancel()
        problems = fuzzer.result.unexpected
        if (growth := fuzzer.result.growth_mib()) is not None and growth > _MOST_GROWTH_MIB:
            problems.append(f"a process grew by {growth:.0f} MiB")
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
    with tempfile.TemporaryDirectory() as directory:
        result, problems = asyncio.run(fuzz(Path(directory), seed, options.messages))
        num_lines = len((Path(directory) / "log").read_text().splitlines())
    for method in sorted({method for method, _ in result.codes}):
        counts = {code: count for (name, code), count in sorted(result.codes.items()) if name == method}
        print(f"{method:62} {'  '.join(f'{code} {count}' for code, count in counts.items())}")
    calls, seconds = sum(result.codes.values()), result.seconds
    print(f"{result.num_messages} messages, {calls} calls, {num_lines} lines in the log, {seconds:.0f} s")
    print(f"{result.num_messages / seconds:.0f} messages/s")
    if (growth := result.growth_mib()) is not None:
        at_end = sorted(result.memory_mib[-1].values())
        print(f"the most that a process grew by: {growth:.0f} MiB; MiB at the end: {at_end}")
    print("slowest health check:", ", ".join(f"{p} {t:.1f} s" for p, t in result.slowest_health_check.items()))
    for problem in problems[:_MOST_PROBLEMS]:
        print(f"WRONG: {problem}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()

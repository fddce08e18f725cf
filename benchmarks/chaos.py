"""Faults at random moments, and what becomes of the texts.

    python benchmarks/chaos.py [--draft-faults 1000] [--target-faults 200] [--client-deaths 200] [--soak-seconds 0]
                               [--sessions 4] [--seed 0] [--json FILE]

First every request undisturbed: greedy and sampled, short and long, of one turn and of two. Then the same requests,
over and over, by several clients at once, while a worker is killed (SIGKILL), stopped for up to two seconds (SIGSTOP),
or its connections are cut or held (half-open) on the way. A seed gives the same requests and the same faults, after the
same pauses. Each text is compared with the undisturbed one, and the sums of the sessions' statistics with the counters.
Then clients that go away in the middle, and how long the workers hold what was theirs. At last, if asked for, a soak:
all of it at a measured pace, with the memory of each process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from wire_faults import Wire

from specd.bench.environment import console, environment, new_table
from specd.bench.prompts import load_prompts
from specd.cli.supervisor import Child, Stack
from specd.errors import error_info
from specd.rpc.client import RawClient
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.text.tokenizer import Tokenizer
from specd.v1 import generation_pb2 as pb
from specd.v1.sampling_pb2 import SamplingParameters

DRAFT_TIMEOUT_SECONDS = 0.5
_LONGEST_STOP_SECONDS = 2.0
_CALM_SECONDS = 20.0  # without faults, to compare with
_COUNTED = ("generated_tokens", "rounds", "proposed_tokens", "accepted_tokens", "target_replays")


@dataclass(frozen=True)
class Request:
    """The prompts of its turns, as token ids, and how its tokens are chosen."""

    turns: tuple[tuple[int, ...], ...]
    max_tokens: int
    temperature: float
    seed: int


def make_requests(rng: random.Random, count: int) -> list[Request]:
    """Return requests of all kinds."""
    tokenizer = Tokenizer((Path(EMBEDDED_TARGET) / "tokenizer.json").read_bytes())
    ids = tokenizer.encode("\n".join(load_prompts().values()))

    def piece(fewest: int, most: int) -> tuple[int, ...]:
        length = rng.randint(fewest, most)
        begin = rng.randrange(len(ids) - length)
        return tuple(ids[begin : begin + length])

    requests = []
    for number in range(count):
        prompt = piece(600, 1200) if number % 8 == 7 else piece(20, 300)
        turns = (prompt, piece(5, 40)) if number % 4 == 3 else (prompt,)
        temperature = (0.0, 0.7, 1.0)[number % 3]
        requests.append(Request(turns, rng.randint(24, 96), temperature, rng.getrandbits(32)))
    return requests


@dataclass
class Answer:
    """Tokens of all turns; the statistics of each, and the longest time between two messages, seconds."""

    token_ids: list[int] = field(default_factory=list)
    statistics: list[pb.SessionStatistics] = field(default_factory=list)
    longest_gap: float = 0.0


async def ask(client: RawClient, request: Request, on_message: Callable[[], None] = lambda: None) -> Answer:
    """Return the answer to a request. Raises AioRpcError."""
    answer, session_id = Answer(), ""
    for turn in request.turns:
        last_at = 0.0
        async for response in client.generate(
            turn,
            session_id=session_id,
            max_tokens=request.max_tokens,
            sampling=SamplingParameters(temperature=request.temperature, seed=request.seed),
            stop=pb.StopConditions(ignore_eos=True),
        ):
            now = time.perf_counter()
            answer.longest_gap = max(answer.longest_gap, now - (last_at or now))
            last_at, session_id = now, response.session_id
            answer.token_ids.extend(token.id for token in response.tokens)
            on_message()
        answer.statistics.append(response.statistics)
    return answer


@dataclass
class Tally:
    """What came of the requests of one phase."""

    right: int = 0
    wrong: int = 0
    replayed: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    sums: Counter[str] = field(default_factory=Counter)
    gaps: list[float] = field(default_factory=list)
    moved: asyncio.Event = field(default_factory=asyncio.Event)  # set by each message

    def add(self, answer: Answer, expected: list[int]) -> None:
        """Count an answer."""
        self.right += answer.token_ids == expected
        self.wrong += answer.token_ids != expected
        self.replayed += any(each.target_replays for each in answer.statistics)
        self.gaps.append(answer.longest_gap)
        for each in answer.statistics:
            self.sums.update({name: getattr(each, name) for name in _COUNTED})

    def record(self) -> dict[str, Any]:
        """Return it for a report."""
        return {
            "faults": dict(self.faults),
            "right": self.right,
            "wrong": self.wrong,
            "replayed": self.replayed,
            "failed": dict(self.failed),
            "longest_gap_seconds": max(self.gaps, default=0.0),
            "p99_of_longest_gaps_seconds": float(np.percentile(self.gaps, 99)) if self.gaps else 0.0,
        }


class Chaos:
    """A stack whose workers are reached by wires that can be harmed, and the texts of all requests undisturbed."""

    def __init__(self, stack: Stack, wires: dict[str, Wire], requests: list[Request], rng: random.Random) -> None:
        self.stack, self.requests = stack, requests
        self._wires, self._rng = wires, rng
        self._expected: dict[Request, list[int]] = {}

    async def learn(self, client: RawClient) -> None:
        """Ask everything once."""
        for request in self.requests:
            self._expected[request] = (await ask(client, request)).token_ids

    async def harm(self, client: RawClient, worker: str, num_faults: int, num_sessions: int) -> Tally:
        """Return what came of requests of several sessions at once while a worker has so many faults."""
        tally, done = Tally(), asyncio.Event()
        before = await counters(self.stack.coordinator)
        queue = iter(lambda: self._rng.choice(self.requests), None)

        async def keep_asking() -> None:
            while not done.is_set():
                await self.tally(client, next(queue), tally)

        asking = [asyncio.ensure_future(keep_asking()) for _ in range(num_sessions)]
        if not num_faults:
            await asyncio.sleep(_CALM_SECONDS)
        child = self.stack.target if worker == "target" else self.stack.children[1]
        for _ in range(num_faults):
            await asyncio.sleep(self._rng.uniform(0.0, 0.5))
            tally.faults[await self._fault(child, self._wires[worker])] += 1
            tally.moved.clear()  # a round that is lost five times in a row fails, and is meant to
            await tally.moved.wait()
        done.set()
        await asyncio.gather(*asking)
        if not tally.failed:
            after = await counters(self.stack.coordinator)
            difference = {name: after[name] - before[name] for name in _COUNTED}
            assert difference == {name: tally.sums[name] for name in _COUNTED}, (difference, tally.sums)
        return tally

    async def tally(self, client: RawClient, request: Request, tally: Tally) -> None:
        """Ask, and count what comes of it."""
        try:
            tally.add(await ask(client, request, tally.moved.set), self._expected[request])
        except grpc.aio.AioRpcError as error:
            tally.failed[error_info(error).reason or error.code().name] += 1

    async def _fault(self, child: Child, wire: Wire) -> str:
        """Do one kind of harm; return its name once the worker can be reached again."""
        kind = self._rng.choices(("kill", "stop", "cut", "hold"), (1, 1, 4, 4))[0]
        seconds = self._rng.uniform(0.05, _LONGEST_STOP_SECONDS)
        if kind == "kill":
            pid = child.pid
            os.kill(pid, signal.SIGKILL)
            while child.pid == pid or not await self._is_whole():  # noqa: ASYNC110 - of other processes
                await asyncio.sleep(0.05)
        elif kind == "stop":
            os.kill(child.pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            os.kill(child.pid, signal.SIGCONT)
        elif kind == "cut":
            await wire.cut()
        else:
            await wire.hold(seconds)
        return kind

    async def _is_whole(self) -> bool:
        with contextlib.suppress(OSError):
            values = await counters(self.stack.coordinator)
            return values["draft_available"] == values["target_available"] == 1
        return False

    async def abandon(self, client: RawClient) -> float:
        """Go away in the middle of an answer; return the seconds until the workers hold nothing of it."""
        most = self._rng.randint(1, 8)
        answers = client.generate(
            self._rng.choice(self.requests).turns[0], max_tokens=96, stop=pb.StopConditions(ignore_eos=True)
        )
        num_answers = 0
        async for _ in answers:
            num_answers += 1
            if num_answers == most:
                break
        answers.cancel()  # type: ignore[attr-defined]
        gone_at = time.perf_counter()
        for child in self.stack.children[1:]:
            while (await counters(child))["worker_active_sessions"]:  # noqa: ASYNC110 - likewise
                await asyncio.sleep(0.002)
        return time.perf_counter() - gone_at


async def counters(child: Child) -> dict[str, float]:
    """Return the metrics of a process that have no labels, by name without `specd_` and `_total`."""

    def scrape() -> str:
        with urllib.request.urlopen(f"http://{child.facts['metrics_address']}/metrics", timeout=10) as response:
            text: str = response.read().decode()
            return text

    return {
        sample.name.removeprefix("specd_").removesuffix("_total"): sample.value
        for family in text_string_to_metric_families(await asyncio.to_thread(scrape))
        for sample in family.samples
        if not sample.labels
    }


def resident_mib(stack: Stack) -> dict[str, float]:
    """Return the memory of each process."""
    memory = {}
    for child in stack.children:
        listing = subprocess.run(["ps", "-o", "rss=", "-p", str(child.pid)], capture_output=True, check=True)
        memory[child.name] = int(listing.stdout) / 1024
    return memory


async def soak(chaos: Chaos, client: RawClient, seconds: float, num_sessions: int) -> dict[str, Any]:
    """Return texts and memory of a long run of `num_sessions` clients that pause between requests."""
    tally, ends_at = Tally(), time.monotonic() + seconds
    rng = random.Random(0)

    async def keep_asking() -> None:
        while time.monotonic() < ends_at:
            began_at = time.monotonic()
            await chaos.tally(client, rng.choice(chaos.requests), tally)
            await asyncio.sleep((time.monotonic() - began_at) / 4)  # 80 % of the time

    asking = [asyncio.ensure_future(keep_asking()) for _ in range(num_sessions)]
    curve = []
    while time.monotonic() < ends_at:
        curve.append({"at": time.monotonic() - ends_at + seconds, **resident_mib(chaos.stack)})
        await asyncio.sleep(min(10.0, seconds / 20))
    await asyncio.gather(*asking)
    settled = curve[len(curve) // 3 :]
    times = [point["at"] / 3600 for point in settled]
    growth = {name: float(np.polyfit(times, [p[name] for p in settled], 1)[0]) for name in settled[0] if name != "at"}
    return {**tally.record(), "growth_mib_per_hour": growth, "memory_mib": curve}


@contextlib.asynccontextmanager
async def reached_by_wires(stack: Stack) -> AsyncIterator[dict[str, Wire]]:
    """Put a wire between the coordinator of a stack that has not started and each worker."""
    command = stack.coordinator.command
    async with contextlib.AsyncExitStack() as running:
        wires = {}
        for worker in ("target", "draft"):
            place = command.index(f"--{worker}") + 1
            path = command[place].removeprefix("unix:")
            wires[worker] = await running.enter_async_context(Wire(f"{path}-wire", path))
            command[place] = f"unix:{path}-wire"
        yield wires


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return what came of all phases."""
    rng = random.Random(options.seed)
    requests = make_requests(rng, options.requests)
    settings = {"SPECD_COORDINATOR_DRAFT_TIMEOUT_SECONDS": str(DRAFT_TIMEOUT_SECONDS)}
    stack = Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=settings)
    report: dict[str, Any] = {}
    async with reached_by_wires(stack) as wires, stack, RawClient(stack.address) as client:
        chaos = Chaos(stack, wires, requests, rng)
        await chaos.learn(client)
        report["no faults"] = (await chaos.harm(client, "draft", 0, options.sessions)).record()
        for worker, num_faults in (("draft", options.draft_faults), ("target", options.target_faults)):
            if num_faults:
                tally = await chaos.harm(client, worker, num_faults, options.sessions)
                report[f"{num_faults} {worker} faults"] = tally.record()
        if options.client_deaths:
            held = [await chaos.abandon(client) for _ in range(options.client_deaths)]
            report[f"{options.client_deaths} client deaths"] = {
                "median_seconds": median(held),
                "longest_seconds": max(held),
                "left": {name: (await counters(stack.coordinator))[name] for name in ("active_sessions",)},
            }
        if options.soak_seconds:
            report["soak"] = await soak(chaos, client, options.soak_seconds, options.sessions)
    return report


def main() -> None:
    """Measure, print a table, write JSON; fail if a text was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft-faults", type=int, default=1000)
    parser.add_argument("--target-faults", type=int, default=200)
    parser.add_argument("--client-deaths", type=int, default=200)
    parser.add_argument("--soak-seconds", type=float, default=0.0)
    parser.add_argument("--requests", type=int, default=24, help="different ones")
    parser.add_argument("--sessions", type=int, default=4, help="at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("SPECD_LOG_LEVEL", "error")
    report = asyncio.run(measure(options))
    output = console()
    for name, record in report.items():
        table = new_table(name, ("",))
        for key, value in record.items():
            if key != "memory_mib":
                table.add_row(key, f"{value:.3f}" if isinstance(value, float) else str(value))
        output.print(table)
    if options.json is not None:
        facts = {"seed": options.seed, "sessions": options.sessions}
        options.json.write_text(json.dumps({"environment": environment(**facts), **report}, indent=1) + "\n")
    if any(record.get("wrong") for record in report.values()):
        raise SystemExit("a text was wrong")


if __name__ == "__main__":
    main()

"""Several targets behind one coordinator: their speed together, what a session loses with its target, and the limit.

    python benchmarks/replicas.py scaling [--targets 1 2 4] [--seconds 10]
    python benchmarks/replicas.py failover [--seeds 200]
    python benchmarks/replicas.py limit [--sessions 64 256 1000] [--seconds 10] [--drafted]

- scaling: simulated targets (`simulated_workers.py`: the real protocol, steps of 30 ms, no MLX, because real targets
  would share this machine's cores), eight sessions each, without a draft.
- failover: two real targets, eight sessions at once, and one target is killed at a random time, in turns until that
  many seeded sessions have run. The texts are compared with undisturbed ones, and the longest gap between two deltas
  of a session is measured.
- limit: one simulated target with ever more sessions: the CPU time of the coordinator for a round, its memory for a
  session, and the time to the first token; with --drafted, a simulated draft proposes four tokens a round.

Exit code 1 if a text is wrong or a request fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
from simulated_workers import VOCABULARY_SIZE, next_token

from specd.bench.environment import console, environment, new_table
from specd.child import Child
from specd.client import AsyncClient, Delta
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack

SESSIONS_PER_TARGET = 8
ENDLESS = 20_000  # tokens
DRAFTED_TOKENS = 4  # a round
FAILOVER_SESSIONS, FAILOVER_TOKENS = 8, 96


@asynccontextmanager
async def simulated(
    num_targets: int, max_sessions: int, *, has_draft: bool = False
) -> AsyncIterator[tuple[Child, AsyncClient]]:
    """Run simulated targets, perhaps a simulated draft, and a coordinator."""
    async with AsyncExitStack() as running:
        directory = Path(running.enter_context(tempfile.TemporaryDirectory()))
        addresses = [f"unix:{directory}/{i}" for i in range(num_targets)]
        script = str(Path(__file__).parent / "simulated_workers.py")
        draft = f"unix:{directory}/draft"
        workers = [("target", address) for address in addresses] + [("draft", draft)] * has_draft
        for kind, address in workers:
            worker = await asyncio.create_subprocess_exec(sys.executable, script, kind, "--listen", address)
            running.push_async_callback(worker.wait)
            running.callback(worker.terminate)
        options = {
            "listen": f"unix:{directory}/coordinator",
            "target": ",".join(addresses),
            "draft": draft if has_draft else "none",
            "max-sessions": str(max_sessions),
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        command = [sys.executable, "-m", "specd", "coordinator", *flags, "--no-lookup", "--metrics-listen", "none"]
        child = Child("coordinator", command, {"XDG_CACHE_HOME": str(directory / "cache")})
        await child.start()
        running.push_async_callback(child.stop)
        await asyncio.sleep(1)  # all targets have come
        client = await running.enter_async_context(AsyncClient(child.facts["address"]))
        yield child, client


class Load:
    """Sessions that generate until they are told to stop."""

    def __init__(self, client: AsyncClient, num_sessions: int, num_draft_tokens: int = 0) -> None:
        self.num_tokens = 0
        self.num_deltas = 0
        self.first_seconds: list[float] = []
        self.num_wrong = 0
        self._client = client
        self._k = num_draft_tokens
        self._tasks = [asyncio.ensure_future(self._generate(i)) for i in range(num_sessions)]

    async def wait_until_all_decode(self) -> None:
        """Wait until each session has its first token. Raises what a session raises."""
        while len(self.first_seconds) < len(self._tasks):
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Cancel all sessions."""
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if not isinstance(outcome, asyncio.CancelledError | None):
                raise outcome

    async def _generate(self, number: int) -> None:
        prompt = [(number * 31 + i) % VOCABULARY_SIZE for i in range(32)]
        began_at, said = time.perf_counter(), list[int]()
        stream = self._client.generate(prompt, max_tokens=ENDLESS, ignore_eos=True, num_draft_tokens=self._k)
        async for event in stream:
            if not isinstance(event, Delta):
                continue
            if not said:
                self.first_seconds.append(time.perf_counter() - began_at)
            last = said[-1] if said else prompt[-1]
            for token in event.tokens:
                self.num_wrong += token.id != next_token(len(prompt) + len(said), last)
                said.append(token.id)
                last = token.id
            self.num_tokens += len(event.tokens)
            self.num_deltas += 1


async def scaling(options: argparse.Namespace) -> dict[str, Any]:
    """Return the tokens per second by number of targets."""
    rates: dict[int, float] = {}
    wrong = 0
    for num_targets in options.targets:
        async with simulated(num_targets, SESSIONS_PER_TARGET) as (_, client):
            load = Load(client, SESSIONS_PER_TARGET * num_targets)
            await load.wait_until_all_decode()
            before, began_at = load.num_tokens, time.perf_counter()
            await asyncio.sleep(options.seconds)
            rates[num_targets] = (load.num_tokens - before) / (time.perf_counter() - began_at)
            await load.stop()
            wrong += load.num_wrong
    one = rates[min(rates)]
    table = new_table("targets", ["sessions", "tokens/s", "times one"])
    for num_targets, rate in rates.items():
        table.add_row(str(num_targets), str(SESSIONS_PER_TARGET * num_targets), f"{rate:.0f}", f"{rate / one:.2f}")
    console().print(table)
    return {"rates": rates, "wrong": wrong, "failed": 0}


async def failover(options: argparse.Namespace) -> dict[str, Any]:
    """Return the wrong texts, and the quantiles of the longest gaps."""
    rng = random.Random(0)
    own = {"OPENBLAS_NUM_THREADS": "1", "SPECD_COORDINATOR_DRAFT_TIMEOUT_SECONDS": "60"}
    gaps, wrong, failed, num_killed = list[float](), 0, 0, 0
    async with (
        Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, num_targets=2, environment=own) as stack,
        AsyncClient(stack.address) as client,
    ):

        async def generate(seed: int, k: int | None) -> tuple[list[int], float]:
            prompt = f"def function_{seed}(values, limit):\n    "
            said, last, longest = list[int](), 0.0, 0.0
            stream = client.generate(
                prompt, max_tokens=FAILOVER_TOKENS, ignore_eos=True, temperature=0.8, seed=seed, num_draft_tokens=k
            )
            async for event in stream:
                if isinstance(event, Delta):
                    now = time.perf_counter()
                    longest, last = max(longest, now - last if last else 0.0), now
                    said += [token.id for token in event.tokens]
            return said, longest

        for first in range(0, options.seeds, FAILOVER_SESSIONS):
            seeds = range(first, min(first + FAILOVER_SESSIONS, options.seeds))
            undisturbed = await asyncio.gather(*(generate(seed, 0) for seed in seeds))
            running = asyncio.gather(*(generate(seed, None) for seed in seeds), return_exceptions=True)
            await asyncio.sleep(rng.uniform(0.2, 1.5))
            if not running.done():
                os.kill(rng.choice(stack.targets).pid, signal.SIGKILL)
                num_killed += 1
            for (text, _), outcome in zip(undisturbed, await running, strict=True):
                if isinstance(outcome, BaseException):
                    failed += 1
                    console().print(repr(outcome))
                else:
                    wrong += outcome[0] != text
                    gaps.append(outcome[1])
            await asyncio.sleep(6)  # until the target is back
    gaps.sort()
    quantiles = {str(q): gaps[min(int(len(gaps) * q), len(gaps) - 1)] for q in (0.5, 0.9, 0.99)}
    console().print(f"{options.seeds} sessions, {num_killed} targets killed: {wrong} wrong texts, {failed} failed")
    console().print(f"longest gap of a session in seconds, by quantile: {quantiles}")
    return {"gaps": gaps, "wrong": wrong, "failed": failed}


async def limit(options: argparse.Namespace) -> dict[str, Any]:
    """Return the coordinator's CPU and memory by number of sessions."""
    table = new_table(
        "sessions", ["tokens/s", "of the target's", "CPU a round, ms", "CPU", "MiB a session", "first, s"]
    )
    results: dict[int, dict[str, float]] = {}
    wrong = 0
    step_seconds = 0.035 if options.drafted else 0.03  # of the draft, too
    for num_sessions in options.sessions:
        async with simulated(1, num_sessions, has_draft=options.drafted) as (child, client):
            process = psutil.Process(child.pid)
            empty = process.memory_info().rss
            load = Load(client, num_sessions, DRAFTED_TOKENS if options.drafted else 0)
            await load.wait_until_all_decode()
            before, cpu, began_at = load.num_deltas, sum(process.cpu_times()[:2]), time.perf_counter()
            tokens_before = load.num_tokens
            await asyncio.sleep(options.seconds)
            seconds, rounds = time.perf_counter() - began_at, load.num_deltas - before
            cpu = sum(process.cpu_times()[:2]) - cpu
            memory = process.memory_info().rss - empty
            await load.stop()
            wrong += load.num_wrong
            first = sorted(load.first_seconds)[int(0.99 * num_sessions)]
            results[num_sessions] = result = {
                "tokens_per_second": (load.num_tokens - tokens_before) / seconds,
                "rounds_per_second": rounds / seconds,
                "cpu_seconds_a_round": cpu / rounds,
                "cpu": cpu / seconds,
                "bytes_a_session": memory / num_sessions,
                "first_token_seconds_p99": first,
            }
            table.add_row(
                str(num_sessions),
                f"{result['tokens_per_second']:.0f}",
                f"{result['rounds_per_second'] * step_seconds / num_sessions:.0%}",
                f"{1000 * result['cpu_seconds_a_round']:.2f}",
                f"{result['cpu']:.0%}",
                f"{result['bytes_a_session'] / 2**20:.2f}",
                f"{first:.2f}",
            )
    console().print(table)
    return {"results": results, "wrong": wrong, "failed": 0}


def main() -> None:
    """Measure, print, write JSON; fail if a text is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["scaling", "failover", "limit"])
    parser.add_argument("--targets", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sessions", type=int, nargs="+", default=[64, 256, 1000])
    parser.add_argument("--drafted", action="store_true", help="limit: with a simulated draft")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    os.environ.setdefault("SPECD_LOG_LEVEL", "error")
    measure = {"scaling": scaling, "failover": failover, "limit": limit}[options.what]
    result = asyncio.run(measure(options))
    if options.json is not None:
        options.json.write_text(
            json.dumps({"environment": environment(prompts=[], turns=1), **result}, indent=1) + "\n"
        )
    sys.exit(bool(result["wrong"] or result["failed"]))


if __name__ == "__main__":
    main()

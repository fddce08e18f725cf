"""A target in several processes: its faults, its overhead, its rest, and what speculation brings it.

    python benchmarks/ranks.py faults [--times 100] [--first 0] [--ranks 2]
    python benchmarks/ranks.py plans [--steps 400]
    python benchmarks/ranks.py idle [--ranks 2] [--seconds 10]
    python benchmarks/ranks.py speculation [--pass-ms 2] [--tokens 128]

- faults: a rank is killed or stopped, or the wire of its sums is cut, held or slow (`wire_faults.py`), in a prefill, a
  decode or a verify, in turns until that many seeded texts have been generated. Each is compared with the undisturbed
  one. Measured are the seconds until all ranks have ended, and until the target serves again. A slow wire ends none.
- plans: the seconds of a step with plans and answers, and of the same step without, where both ranks know it.
- idle: the CPU time of each rank without sessions.
- speculation: the tokens per second with a draft, and of the target alone, where sums make each pass longer.

Models are random, with heads that two and three ranks divide. Exit code 1 if a text is wrong or a process stays.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from specd.bench.environment import console, environment, new_table, say
from specd.child import Child
from specd.client import AsyncClient, Delta
from specd.supervisor import Stack

ROOT = Path(__file__).parents[1]
MAKE = """
import sys; sys.path.insert(0, {root!r})
from pathlib import Path
from tests.worker.divisible_models import save_divisible
save_divisible(Path({directory!r}) / "target", "llama", **{sizes})
save_divisible(Path({directory!r}) / "draft", "llama", noise={noise}, **{sizes})
"""
FAULTS = ("kill", "stop", "cut", "hold", "slow")
STEPS = ("prefill", "decode", "verify")
SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "cut": signal.SIGUSR1,
    "hold": signal.SIGUSR2,
    "slow": signal.SIGHUP,
}
PROMPT = (ROOT / "benchmarks" / "prompts" / "22-task_store_cli.txt").read_text()
TOKENS = 24
# A machine that is busy with other programs takes a second for a chunk of a prompt.
DEADLINE_SECONDS = float(os.environ.get("RANK_DEADLINE_SECONDS", "1"))


def make_pair(directory: str, *, noise: float = 0.02, **sizes: Any) -> tuple[str, str]:
    """Make a target and a draft in another process, because this one has no MLX."""
    code = MAKE.format(root=str(ROOT), directory=directory, noise=noise, sizes=sizes)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    return f"{directory}/target", f"{directory}/draft"


@asynccontextmanager
async def running(num_ranks: int, *, draft: bool = True, **variables: str) -> AsyncIterator[tuple[Stack, AsyncClient]]:
    """Run a stack with wires between the ranks."""
    with tempfile.TemporaryDirectory() as directory:
        target, other = make_pair(directory)
        settings = {
            "OPENBLAS_NUM_THREADS": "1",
            "SPECD_TARGET_WORKER_RANK_DEADLINE_SECONDS": str(DEADLINE_SECONDS),
            "SPECD_TARGET_WORKER_CALIBRATION_SECONDS": "0.5",
            "SPECD_COORDINATOR_DRAFT_TIMEOUT_SECONDS": "60",
            "SPECD_LOG_LEVEL": "error",
            **variables,
        }
        stack = Stack(target=target, draft=other if draft else "", num_ranks=num_ranks, environment=settings)
        for child in ranks_of(stack):
            child.command[1:4] = [str(Path(__file__).parent / "rank_behind_wire.py")]
        async with stack, AsyncClient(stack.address) as client:
            yield stack, client


def ranks_of(stack: Stack) -> list[Child]:
    """Return the processes of the target, by rank."""
    return [stack.target, *stack.target.followers]


async def generate(
    client: AsyncClient, prompt: str, k: int | None, *, tokens: int = TOKENS, on_round: Any = None
) -> list[int]:
    """Return the tokens of a completion."""
    said: list[int] = []
    stream = client.generate(prompt, max_tokens=tokens, num_draft_tokens=k, temperature=0.7, seed=5, ignore_eos=True)
    count = 0
    async for event in stream:
        if isinstance(event, Delta):
            said += [token.id for token in event.tokens]
            count += 1
            if on_round is not None:
                on_round(count)
    return said


class Strike:
    """A fault of one rank, and the times of its consequences."""

    def __init__(self, stack: Stack, fault: str, step: str, rank: int) -> None:
        self.step = step
        self.ended_seconds = self.back_seconds = 0.0
        self._signal, self._rank = SIGNALS[fault], rank
        self._stack = stack
        self._processes: list[psutil.Process] = []
        self._began_at = 0.0
        self.ending: asyncio.Task[None] | None = None

    def strike(self) -> None:
        """Send the signal, and begin to measure."""
        self._processes = [psutil.Process(child.pid) for child in ranks_of(self._stack)]
        self._began_at = time.perf_counter()
        self._processes[self._rank].send_signal(self._signal)
        self.ending = asyncio.ensure_future(self._wait_for_end())

    def on_round(self, count: int) -> None:
        """Strike in the fourth round of a decode or a verify, and note the first round after the end of all ranks."""
        if count == 4 and self.step != "prefill":
            self.strike()
        elif self.ended_seconds and not self.back_seconds:
            self.back_seconds = time.perf_counter() - self._began_at

    async def _wait_for_end(self) -> None:
        while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in self._processes):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        self.ended_seconds = time.perf_counter() - self._began_at


async def faults(options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds by fault, and the number of wrong texts and of processes that stayed."""
    cases = itertools.cycle(itertools.product(FAULTS, STEPS, range(options.ranks)))
    struck: dict[str, list[Strike]] = {fault: [] for fault in FAULTS}
    wrong = 0
    async with running(options.ranks) as (stack, client):
        for number, (fault, step, rank) in itertools.islice(
            enumerate(cases), options.first, options.first + options.times
        ):
            prompt = f"# {random.Random(number).random()}\n" + (PROMPT if step == "prefill" else "def area(shape):\n")
            strike = Strike(stack, fault, step, rank)
            if step == "prefill":
                asyncio.get_running_loop().call_later(0.25, strike.strike)
            began_at = time.perf_counter()
            text = await generate(client, prompt, 0 if step == "decode" else 4, on_round=strike.on_round)
            took = time.perf_counter() - began_at
            if strike.ending is not None:
                if fault == "slow":
                    strike.ending.cancel()
                else:
                    await strike.ending
                struck[fault].append(strike)
            is_wrong = text != await generate(client, prompt, 0)
            wrong += is_wrong
            after = (
                f"{strike.ended_seconds:.2f} s, next round after {strike.back_seconds:.2f} s, text after {took:.2f} s"
            )
            say(f"{number}: {fault} of rank {rank} in a {step}: ended after {after}{', WRONG' if is_wrong else ''}")
        last = [psutil.Process(child.pid) for child in ranks_of(stack)]
    left = sum(process.is_running() for process in last)
    headers = ("number", "all ended, median s", "longest", "next round, median s", "longest")
    table = new_table("fault", headers)
    result: dict[str, Any] = {"texts": options.times, "wrong": wrong, "processes_left": left}
    for fault, strikes in struck.items():
        ended = [each.ended_seconds for each in strikes] or [0.0]
        back = [each.back_seconds for each in strikes if each.back_seconds] or [0.0]
        values = (statistics.median(ended), max(ended), statistics.median(back), max(back))
        table.add_row(fault, str(len(strikes)), *(f"{value:.2f}" for value in values))
        names = ("ended", "ended_longest", "next_round", "next_round_longest")
        result[fault] = {"number": len(strikes), **dict(zip(names, values, strict=True))}
    console().print(table)
    console().print(f"{wrong} of {options.times} texts are wrong, {left} processes are left")
    return result


async def plans(options: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of a step without and with plans."""
    with tempfile.TemporaryDirectory() as directory:
        target, _ = make_pair(directory)
        command = [sys.executable, str(Path(__file__).parent / "rank_steps.py"), target, str(options.steps)]
        done = await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    table = new_table("width", ("without plans, ms", "with plans, ms", "a plan, ms"))
    for width, (without, with_plans) in result.items():
        table.add_row(width, f"{without:.2f}", f"{with_plans:.2f}", f"{with_plans - without:.2f}")
    console().print(table)
    return result


async def idle(options: argparse.Namespace) -> dict[str, Any]:
    """Return the part of a core that each rank takes without sessions."""
    async with running(options.ranks, draft=False) as (stack, client):
        await generate(client, "def", 0)
        await asyncio.sleep(2)
        processes = [psutil.Process(child.pid) for child in ranks_of(stack)]
        before = [sum(process.cpu_times()[:2]) for process in processes]
        await asyncio.sleep(options.seconds)
        used = [sum(process.cpu_times()[:2]) - own for process, own in zip(processes, before, strict=True)]
    parts = [seconds / options.seconds for seconds in used]
    console().print("CPU of the ranks: " + ", ".join(f"{100 * part:.1f} %" for part in parts))
    return {"parts_of_a_core": parts}


async def speculation(options: argparse.Namespace) -> dict[str, Any]:
    """Return the tokens per second with and without a draft, in turns."""
    rates: dict[str, list[float]] = {"auto": [], "0": []}
    texts = set()
    async with running(options.ranks, PASS_SECONDS=str(options.pass_ms / 1000)) as (_, client):
        await generate(client, "def warm(up):", None, tokens=options.tokens)
        for _, k in itertools.product(range(options.turns), rates):
            began_at = time.perf_counter()
            said = await generate(client, "def area(shape):\n", None if k == "auto" else 0, tokens=options.tokens)
            rates[k].append(len(said) / (time.perf_counter() - began_at))
            texts.add(tuple(said))
    medians = {k: statistics.median(own) for k, own in rates.items()}
    ratio = medians["auto"] / medians["0"]
    console().print(
        f"tokens/s: {medians['auto']:.1f} with the draft, {medians['0']:.1f} alone: {ratio:.2f} times as fast"
    )
    return {"tokens_per_second": medians, "ratio": ratio, "wrong": len(texts) - 1}


def main() -> None:
    """Run a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parts = parser.add_subparsers(dest="part", required=True)
    arguments_of: dict[Any, dict[str, Any]] = {
        faults: {"times": 100, "first": 0, "ranks": 2},
        plans: {"steps": 400},
        idle: {"ranks": 2, "seconds": 10},
        speculation: {"ranks": 2, "pass-ms": 2.0, "tokens": 128, "turns": 5},
    }
    for part, arguments in arguments_of.items():
        own = parts.add_parser(part.__name__)
        for name, default in arguments.items():
            own.add_argument(f"--{name}", type=type(default), default=default)
    options = parser.parse_args()
    result = asyncio.run(
        {"faults": faults, "plans": plans, "idle": idle, "speculation": speculation}[options.part](options)
    )
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        options.json.write_text(
            json.dumps({**known, "environment": environment(), options.part: result}, indent=1) + "\n"
        )
    sys.exit(bool(result.get("wrong") or result.get("processes_left")))


if __name__ == "__main__":
    main()

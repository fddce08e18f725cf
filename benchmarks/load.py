"""Latency under load: requests that arrive at random times, whether the others are done or not.

    python -m benchmarks.load [--loads 0.5 0.8 1.2 10] [--seconds 60] [--max-sessions 8] [--max-queued 16] [-k 3]

First the capacity: the requests a second that as many clients as sessions may run get through, each asking again as
soon as it has its answer. And what one request takes while there is no other. Then arrivals at a part of the capacity,
at exponentially distributed intervals (a Poisson process), whose answers are the ones that count: time to first token,
from the request on, and time per output token, (end - first) / (tokens - 1), for those that were admitted; and how
many were turned away, and how long that took. Then the time from the last arrival until a request gets its first token
as soon as without load, within a factor of 1.5; and what the processes' memory grew by.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from specd.bench.prompts import load_prompts
from specd.client import NO_RETRIES, AsyncClient
from specd.errors import ResourceExhaustedError
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import NO_PREFIX_CACHE, Stack
from tests.e2e.processes import resident_mib

PROMPT_TOKENS = (100, 300)
OUTPUT_TOKENS = (32, 128)


@dataclass(frozen=True)
class Request:
    """A client's request."""

    prompt_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Answer:
    """The times of a request, in seconds; it was turned away if it has no tokens.

    `waited` is whether it was turned away later, for the request of another client.
    """

    seconds: float
    seconds_to_first_token: float = 0.0
    seconds_per_output_token: float = 0.0
    num_tokens: int = 0
    waited: bool = False


class Requests:
    """Random requests: another piece of the prompts each, of random length."""

    def __init__(self, seed: int) -> None:
        tokenizer = Tokenizer.from_file(str(Path(EMBEDDED_TARGET) / "tokenizer.json"))
        self._ids = tokenizer.encode("\n".join(load_prompts().values())).ids
        self._random = random.Random(seed)

    def next(self) -> Request:
        """Make another one."""
        length = self._random.randint(*PROMPT_TOKENS)
        start = self._random.randrange(len(self._ids) - length)
        return Request(tuple(self._ids[start : start + length]), self._random.randint(*OUTPUT_TOKENS))

    def seconds_to_next(self, rate: float) -> float:
        """Draw the time between two arrivals."""
        return self._random.expovariate(rate)


async def ask(client: AsyncClient, request: Request, k: int) -> Answer:
    """Ask, and measure the answer."""
    num_tokens = 0
    asked_at = first_at = last_at = time.perf_counter()
    try:
        stream = client.generate(request.prompt_ids, max_tokens=request.max_tokens, num_draft_tokens=k, ignore_eos=True)
        async for response in stream.messages():
            last_at = time.perf_counter()
            if not num_tokens:
                first_at = last_at
            num_tokens += len(response.tokens)
    except ResourceExhaustedError as error:
        return Answer(time.perf_counter() - asked_at, waited="gave_way" in error.metadata)
    return Answer(last_at - asked_at, first_at - asked_at, (last_at - first_at) / (num_tokens - 1), num_tokens)


async def measure_capacity(client: AsyncClient, requests: Requests, num_clients: int, seconds: float, k: int) -> float:
    """Return the requests a second that as many clients get through."""
    started_at = time.perf_counter()
    ended_at: list[float] = []

    async def keep_asking() -> None:
        while time.perf_counter() < started_at + seconds:
            await ask(client, requests.next(), k)
            ended_at.append(time.perf_counter())

    await asyncio.gather(*(keep_asking() for _ in range(num_clients)))
    within = sum(end <= started_at + seconds for end in ended_at)
    return within / seconds


async def measure_load(
    client: AsyncClient, requests: Requests, rate: float, seconds: float, k: int, usual_seconds: float
) -> tuple[list[Answer], float]:
    """Let requests arrive at a rate; return all answers, and the seconds to recover, `usual_seconds` being usual."""
    asking = []
    now = started_at = time.perf_counter()
    while (now := now + requests.seconds_to_next(rate)) < started_at + seconds:
        await asyncio.sleep(now - time.perf_counter())
        asking.append(asyncio.create_task(ask(client, requests.next(), k)))
    recovery_seconds = await measure_recovery(client, requests, usual_seconds, k)
    return await asyncio.gather(*asking), recovery_seconds


async def measure_recovery(client: AsyncClient, requests: Requests, usual_seconds: float, k: int) -> float:
    """Return the seconds until a request is begun that gets its first token in 1.5 times the usual seconds."""
    ended_at = time.perf_counter()
    while True:
        asked_at = time.perf_counter()
        answer = await ask(client, requests.next(), k)
        if answer.num_tokens and answer.seconds_to_first_token <= 1.5 * usual_seconds:
            return asked_at - ended_at


def summarise(answers: Sequence[Answer]) -> dict[str, float]:
    """Take the percentiles."""
    served = [answer for answer in answers if answer.num_tokens]
    rejected = [answer for answer in answers if not answer.num_tokens]
    record: dict[str, float] = {"requests": len(answers), "rejected": len(rejected)}
    for name, values in (
        ("first_token_ms", [answer.seconds_to_first_token for answer in served]),
        ("per_output_token_ms", [answer.seconds_per_output_token for answer in served]),
        ("reject_ms", [answer.seconds for answer in rejected]),
    ):
        for percentile in (50, 99):
            record[f"{name}_p{percentile}"] = 1000 * float(np.percentile(values, percentile)) if values else 0.0
    return record


async def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure all loads on one stack."""
    limits = {
        "SPECD_COORDINATOR_MAX_SESSIONS": str(options.max_sessions),
        "SPECD_COORDINATOR_MAX_QUEUED": str(options.max_queued),
    }
    requests = Requests(options.seed)
    async with (
        Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=NO_PREFIX_CACHE | limits) as stack,
        AsyncClient(stack.address, retries=NO_RETRIES) as client,
    ):
        for _ in range(3):
            await ask(client, requests.next(), options.k)
        unloaded = [await ask(client, requests.next(), options.k) for _ in range(options.unloaded_requests)]
        capacity = await measure_capacity(client, requests, options.max_sessions, options.seconds, options.k)
        results = {"unloaded": summarise(unloaded)}
        usual_seconds = results["unloaded"]["first_token_ms_p50"] / 1000
        print(f"capacity: {capacity:.2f} requests a second\n" + HEADER)
        print(line("unloaded", results["unloaded"]), flush=True)
        for load in options.loads:
            name = f"{load:.0%} of capacity"
            before = [resident_mib(child.pid) for child in stack.children]
            answers, recovery_seconds = await measure_load(
                client, requests, load * capacity, options.seconds, options.k, usual_seconds
            )
            results[name] = summarise(answers)
            results[name]["recovery_seconds"] = recovery_seconds
            results[name]["growth_mib"] = sum(resident_mib(child.pid) for child in stack.children) - sum(before)
            print(line(name, results[name]), flush=True)
        return results


HEADER = (
    "load              requests  rejected  first token ms p50, p99  per output token ms p50, p99  reject ms p50, p99"
    "  recovery s  growth MiB"
)


def line(name: str, record: dict[str, float]) -> str:
    """Lay a result out."""
    pairs = [
        f"{record[f'{what}_p50']:.{digits}f}, {record[f'{what}_p99']:.{digits}f}"
        for what, digits in (("first_token_ms", 0), ("per_output_token_ms", 1), ("reject_ms", 1))
    ]
    counts = f"{record['requests']:8.0f}  {record['rejected']:8.0f}"
    return f"{name:16}  {counts}  {pairs[0]:>23}  {pairs[1]:>28}  {pairs[2]:>18}" + (
        f"  {record['recovery_seconds']:10.1f}  {record['growth_mib']:10.1f}" if "recovery_seconds" in record else ""
    )


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 1.2, 10.0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--unloaded-requests", type=int, default=20)
    parser.add_argument("--max-sessions", type=int, default=8)
    parser.add_argument("--max-queued", type=int, default=16)
    parser.add_argument("-k", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("SPECD_LOG_LEVEL", "warning")
    results = asyncio.run(measure(options))
    unloaded = results["unloaded"]["per_output_token_ms_p99"]
    for name, record in results.items():
        ratio = record["per_output_token_ms_p99"] / unloaded
        print(f"time per output token, p99, {name} / unloaded: {ratio:.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

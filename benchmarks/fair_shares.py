"""A client that minds its own, beside one that never reads and asks for ten times what there is.

    python -m benchmarks.fair_shares [--requests 30] [--never-reading 40] [--load 10] [--json FILE]

Both clients have a token. First the well-behaved one alone: one request after the other. Then the other one opens
streams that it never reads, and its requests arrive at a multiple of the rate that it could get answers at. Time to the
first token of the one, and how long it takes to turn the other away.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.load import Answer, Requests, ask, measure_capacity
from specd.bench.environment import console, environment, new_table
from specd.client import NO_RETRIES, AsyncClient
from specd.rpc.credentials import ClientCredentials
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import NO_PREFIX_CACHE, Stack
from specd.v1.generation_pb2 import GenerateRequest, StopConditions
from tests.e2e.guarded import make_tokens
from tests.security.http2 import Connection

_GENERATE = "/specd.v1.GenerationService/Generate"
_K = 3
_CAPACITY_SECONDS = 15.0
_SESSIONS, _QUEUED = 8, 64


async def never_read(address: str, token: str, count: int) -> asyncio.Task[None]:
    """Open streams whose windows are shut, and do no more than answer pings."""
    connection = await Connection.open(address, window=0)
    request = GenerateRequest(text="def f(", max_tokens=1500, stop=StopConditions(ignore_eos=True))
    for _ in range(count):
        connection.begin(_GENERATE, request.SerializeToString(), metadata=[("authorization", f"Bearer {token}")])
    await connection.flush()

    async def keep_connected() -> None:
        try:
            while True:
                await connection.receive()
        finally:
            connection.close()

    return asyncio.create_task(keep_connected())


async def one_after_the_other(client: AsyncClient, requests: Requests, count: int) -> list[Answer]:
    """Return the answers to requests of one client."""
    return [await ask(client, requests.next(), _K) for _ in range(count)]


async def arrive(client: AsyncClient, requests: Requests, rate: float, ended: asyncio.Event) -> list[Answer]:
    """Let requests arrive at random times until the end, and return all answers."""
    asking, now = [], time.perf_counter()
    while not ended.is_set():
        now += requests.seconds_to_next(rate)
        await asyncio.sleep(max(now - time.perf_counter(), 0.0))
        asking.append(asyncio.create_task(ask(client, requests.next(), _K)))
    return await asyncio.gather(*asking)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the numbers of both clients."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokens"
        own_text, other_text = make_tokens(path, "own", "other")
        settings = {
            "SPECD_COORDINATOR_TOKENS": str(path),
            "SPECD_COORDINATOR_MAX_SESSIONS": str(_SESSIONS),
            "SPECD_COORDINATOR_MAX_QUEUED": str(_QUEUED),
        }
        async with (
            Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=NO_PREFIX_CACHE | settings) as stack,
            AsyncClient(stack.address, credentials=ClientCredentials(token=own_text), retries=NO_RETRIES) as client,
            AsyncClient(stack.address, credentials=ClientCredentials(token=other_text), retries=NO_RETRIES) as greedy,
        ):
            requests, ended = Requests(options.seed), asyncio.Event()
            await one_after_the_other(client, requests, 3)
            alone = await one_after_the_other(client, requests, options.requests)
            capacity = await measure_capacity(greedy, requests, _SESSIONS, _CAPACITY_SECONDS, _K)
            reading = await never_read(stack.address, other_text, options.never_reading)
            flood = asyncio.create_task(arrive(greedy, requests, options.load * capacity, ended))
            await asyncio.sleep(3.0)
            beside = await one_after_the_other(client, requests, options.requests)
            ended.set()
            reading.cancel()
            flooded = await flood
    rejected = [1000 * answer.seconds for answer in flooded if not answer.num_tokens and not answer.waited]

    def first_tokens(answers: list[Answer]) -> dict[str, float]:
        times = [1000 * answer.seconds_to_first_token for answer in answers if answer.num_tokens]
        return {f"first_token_ms_p{q}": float(np.percentile(times, q)) for q in (50, 90)} | {
            "turned_away": len(answers) - len(times)
        }

    round_ms = 1000 * float(np.median([answer.seconds_per_output_token for answer in beside]))
    return {
        "capacity_per_second": capacity,
        "alone": first_tokens(alone),
        "beside": {**first_tokens(beside), "per_output_token_ms": round_ms},
        "other": {
            "requests": len(flooded),
            "rejected_at_once": len(rejected),
            "gave_way": sum(answer.waited for answer in flooded),
            **{f"reject_ms_p{q}": float(np.percentile(rejected, q)) if rejected else 0.0 for q in (50, 99)},
        },
    }


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=30, help="of the well-behaved client, alone and beside")
    parser.add_argument("--never-reading", type=int, default=40, help="streams of the other one")
    parser.add_argument("--load", type=float, default=10.0, help="of the other one, as a multiple of the capacity")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("SPECD_LOG_LEVEL", "error")
    report = asyncio.run(measure(options))
    table = new_table("", ("",))
    for name, record in report.items():
        for key, value in record.items() if isinstance(record, dict) else [("", record)]:
            table.add_row(f"{name}: {key}" if key else name, f"{value:.1f}")
    console().print(table)
    if options.json is not None:
        facts = {"never_reading": options.never_reading, "load": options.load}
        options.json.write_text(json.dumps({"environment": environment(**facts), **report}, indent=1) + "\n")


if __name__ == "__main__":
    main()

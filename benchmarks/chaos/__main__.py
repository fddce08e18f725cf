"""Faults at random moments, and what becomes of the texts.

    python -m benchmarks.chaos [--draft-faults 1000] [--target-faults 200] [--coordinator-faults 50]
                               [--client-deaths 200] [--calm-seconds 20] [--soak-seconds 0] [--requests 24]
                               [--sessions 4] [--seed 0] [--json FILE] [--plot FILE]

First every request undisturbed: greedy and sampled, short and long, of one turn and of two. Then the same requests,
over and over, by several clients at once, while a worker is killed, told to stop, stopped for up to two seconds, or may
open no more files, or its connections are cut, held (half-open) or long. A seed gives the same requests and the same
faults, after the same pauses. Each text is compared with the undisturbed one, and the sums of the sessions' statistics
with the counters. The same for the coordinator, with clients that resume. Then clients that go away in the middle, and
how long the workers hold what was theirs. At last, if asked for, a soak: requests at a measured pace, with the memory
of each process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.chaos.faults import Faults, reached_by_wires
from benchmarks.chaos.requests import make_requests
from benchmarks.chaos.run import Run
from benchmarks.chaos.soak import plot, soak
from specd.bench.environment import console, environment, new_table
from specd.client import NO_RETRIES, AsyncClient
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from tests.e2e.faults import scrape

_DRAFT_TIMEOUT_SECONDS = 0.5
_KEPT_SECONDS = 60


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return what came of all phases."""
    rng = random.Random(options.seed)
    requests = make_requests(rng, options.requests)
    settings = {
        "SPECD_COORDINATOR_DRAFT_TIMEOUT_SECONDS": str(_DRAFT_TIMEOUT_SECONDS),
        # Or the sessions that are kept would look like growth for the first ten minutes.
        "SPECD_COORDINATOR_SESSION_IDLE_SECONDS": str(_KEPT_SECONDS),
    }
    stack = Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=settings)
    report: dict[str, Any] = {}
    async with (
        reached_by_wires(stack) as wires,
        stack,
        AsyncClient(stack.address, retries=NO_RETRIES) as client,
        AsyncClient(stack.address) as patient,
    ):
        run = Run(stack, requests, rng, options.sessions)
        await run.learn(client)
        report["no faults"] = (await run.undisturbed(client, options.calm_seconds)).record()
        for name, count in (("draft", options.draft_faults), ("target", options.target_faults)):
            if count:
                tally = await run.while_harmed(client, Faults(stack, name, wires[name], rng), count)
                report[f"{count} {name} faults"] = tally.record()
        if count := options.coordinator_faults:
            tally = await run.while_restarted(patient, Faults(stack, "coordinator", None, rng), count)
            report[f"{count} coordinator faults"] = tally.record()
        if count := options.client_deaths:
            held = [await run.abandon(client) for _ in range(count)]
            values = await scrape(stack.coordinator)
            report[f"{count} client deaths"] = {
                "median_seconds": median(held),
                "longest_seconds": max(held),
                "active_sessions": values["specd_active_sessions"],
                "open_descriptors": values.get("process_open_fds"),
            }
        if options.soak_seconds:
            report["soak"] = await soak(run, client, options.soak_seconds, options.sessions)
    return report


def main() -> None:
    """Measure, print tables, write JSON; fail if a text was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft-faults", type=int, default=1000)
    parser.add_argument("--target-faults", type=int, default=200)
    parser.add_argument("--coordinator-faults", type=int, default=50)
    parser.add_argument("--client-deaths", type=int, default=200)
    parser.add_argument("--calm-seconds", type=float, default=20.0, help="without faults, to compare with")
    parser.add_argument("--soak-seconds", type=float, default=0.0)
    parser.add_argument("--requests", type=int, default=24, help="different ones")
    parser.add_argument("--sessions", type=int, default=4, help="at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="picture of the memory over the soak")
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
    if options.plot is not None and "soak" in report:
        plot(report["soak"], options.plot)
    if any(record.get("wrong") for record in report.values()):
        raise SystemExit("a text was wrong")


if __name__ == "__main__":
    main()

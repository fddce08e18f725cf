"""A target that drafts itself beside a draft worker, on the same requests in turns.

    python benchmarks/draft_in_target.py [-k 3] [--target MODEL --draft MODEL] [--turns 5] [--json FILE]

Each cell is a number of sessions and a temperature, with k draft tokens and with k that the planner chooses. Both
services run all the time, and each has a target worker of its own. A ratio is the median over the turns.
Exit code 1 if the tokens differ.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

from planners import Cell, ask

from specd.bench.environment import console, environment, new_table
from specd.bench.prompts import load_prompts
from specd.client import AsyncClient
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack

WORKER, TARGET = "draft worker", "in the target"
NUM_REQUESTS, MAX_TOKENS = 16, 64


async def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return by cell the tokens per second of each turn by service, and whether the tokens were the same."""
    prompts = list(load_prompts(options.prompts).values())
    results: dict[str, dict[str, Any]] = {}
    async with AsyncExitStack() as running:
        variables = {"XDG_CACHE_HOME": running.enter_context(tempfile.TemporaryDirectory())}
        clients = {}
        for name, draft, own in ((WORKER, options.draft, "none"), (TARGET, "", options.draft)):
            settings = {"target-worker": {"self_draft": own}}
            stack = Stack(target=options.target, draft=draft, options=settings, environment=variables)
            await running.enter_async_context(stack)
            clients[name] = await running.enter_async_context(AsyncClient(stack.address))
        for sessions, temperature, k in itertools.product((1, 4, 8), (0.0, 1.0), (options.k, None)):
            cell = Cell("good", sessions, temperature)
            rates: dict[str, list[float]] = {name: [] for name in clients}
            texts = []
            for turn in range(options.turns + 1):  # the first fills the prefix caches
                for name in [*clients][:: 1 if turn % 2 else -1]:
                    rate, said = await ask(clients[name], cell, prompts, NUM_REQUESTS, MAX_TOKENS, k)
                    rates[name] += [rate] * (turn > 0)
                    texts.append(said)
            same = all(said == texts[0] for said in texts)
            shown = f"{sessions} sessions, T = {temperature:g}, k {'chosen' if k is None else f'= {k}'}"
            ratio = median(own / other for own, other in zip(rates[TARGET], rates[WORKER], strict=True))
            results[shown] = {"rates": rates, "ratio": ratio, "same_tokens": same}
            console().print(f"{shown}: {ratio:.3f}", highlight=False)
    return results


def main() -> int:
    """Measure, print a table and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=EMBEDDED_TARGET)
    parser.add_argument("--draft", default=EMBEDDED_DRAFT)
    parser.add_argument("-k", type=int, default=3, help="the fixed number of draft tokens")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "unseen" / "held_out")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    os.environ.setdefault("SPECD_LOG_LEVEL", "warning")
    results = asyncio.run(measure(options))
    table = new_table("tokens/s", [WORKER, TARGET, "ratio", "tokens"])
    for name, cell in results.items():
        medians = (f"{median(cell['rates'][each]):.0f}" for each in (WORKER, TARGET))
        table.add_row(name, *medians, f"{cell['ratio']:.2f}", "same" if cell["same_tokens"] else "DIFFERENT")
    console().print(table)
    if options.json is not None:
        about = environment(prompts=[], turns=options.turns)
        options.json.write_text(json.dumps({"environment": about, "results": results}, indent=1))
    return 0 if all(cell["same_tokens"] for cell in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""A pair of services on the same requests in turns: what the scripts that compare two services share."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence
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

NUM_REQUESTS, MAX_TOKENS = 16, 64
CELLS = [Cell("good", *each) for each in itertools.product((1, 4, 8), (0.0, 1.0))]


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that these scripts share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=EMBEDDED_TARGET)
    parser.add_argument("--draft", default=EMBEDDED_DRAFT)
    parser.add_argument("-k", type=int, default=3, help="the fixed number of draft tokens")
    parser.add_argument("--cells", nargs="+", help="only these cells, such as '8 sessions, T = 1, k chosen'")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "unseen" / "held_out")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    return parser


def compare(stacks: Mapping[str, Stack], options: argparse.Namespace) -> int:
    """Measure two services, print a table of the second beside the first, and return the exit code."""
    os.environ.setdefault("SPECD_LOG_LEVEL", "warning")
    first, second = stacks
    cells = {_name(cell, k): (cell, k) for cell, k in itertools.product(CELLS, (options.k, None))}
    if unknown := set(options.cells or ()) - cells.keys():
        sys.exit(f"no cells {sorted(unknown)}; there are: {', '.join(map(repr, cells))}")
    chosen = {name: cells[name] for name in options.cells or cells}
    results = asyncio.run(_measure(stacks, options, chosen))
    table = new_table("tokens/s", [first, second, "ratio", "tokens"])
    for name, cell in results.items():
        medians = (f"{median(cell['rates'][each]):.0f}" for each in stacks)
        table.add_row(name, *medians, f"{cell['ratio']:.2f}", "same" if cell["same_tokens"] else "DIFFERENT")
    console().print(table)
    if options.json is not None:
        about = environment(prompts=[], turns=options.turns)
        options.json.write_text(json.dumps({"environment": about, "results": results}, indent=1))
    return 0 if all(cell["same_tokens"] for cell in results.values()) else 1


async def _measure(
    stacks: Mapping[str, Stack], options: argparse.Namespace, cells: Mapping[str, tuple[Cell, int | None]]
) -> dict[str, dict[str, Any]]:
    """Return by cell the tokens per second of each turn by service, and whether the tokens were the same."""
    prompts = list(load_prompts(options.prompts).values())
    results: dict[str, dict[str, Any]] = {}
    async with AsyncExitStack() as running:
        clients = {}
        for name, stack in stacks.items():
            await running.enter_async_context(stack)
            clients[name] = await running.enter_async_context(AsyncClient(stack.address))
        for name, (cell, k) in cells.items():
            results[name] = result = await _turns(clients, cell, k, prompts, options.turns)
            console().print(f"{name}: {result['ratio']:.3f}", highlight=False)
    return results


async def _turns(
    clients: Mapping[str, AsyncClient], cell: Cell, k: int | None, prompts: Sequence[str], turns: int
) -> dict[str, Any]:
    rates: dict[str, list[float]] = {name: [] for name in clients}
    texts = []
    for turn in range(turns + 1):  # the first fills the prefix caches
        for name in [*clients][:: 1 if turn % 2 else -1]:
            rate, said = await ask(clients[name], cell, prompts, NUM_REQUESTS, MAX_TOKENS, k)
            rates[name] += [rate] * (turn > 0)
            texts.append(said)
    ratio = median(own / other for other, own in zip(*rates.values(), strict=True))
    return {"rates": rates, "ratio": ratio, "same_tokens": all(said == texts[0] for said in texts)}


def _name(cell: Cell, k: int | None) -> str:
    return f"{cell.sessions} sessions, T = {cell.temperature:g}, k {'chosen' if k is None else f'= {k}'}"

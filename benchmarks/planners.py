"""The planner beside each fixed k and the target alone, on prompts that it was not tuned on.

    python benchmarks/planners.py [--runs new restarted long] [--cells 'good 4 T=1' …] [--turns 5] [--json FILE]

A cell is a draft (the embedded one, or one of random weights), a number of sessions and a temperature. A run is:

- new: 16 requests of 64 tokens, at a coordinator that has just started and has learnt nothing.
- restarted: the same, after a restart of that coordinator.
- long: 32 requests of 192 tokens, at a coordinator that has just started and has learnt nothing.

All share the workers, because two processes of the same program can differ by 8 % as long as they run. The coordinator
of a fixed k has just started, too. In each cell the contenders take turns on the same requests, and all give the same
tokens. A ratio is the median over the turns; the best fixed k is that with the best median.
Exit code 1 if the planner is below 0.97 of the best fixed k (1.05 in long runs), with the random draft of the target
alone, or if the tokens differ.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from never_slower import save_random_draft

from specd.bench.environment import console, environment, new_table
from specd.bench.prompts import load_prompts
from specd.bench.turns import rotated
from specd.child import Child
from specd.client import AsyncClient, Delta
from specd.settings import EMBEDDED_DRAFT

PLANNER, TARGET_ONLY = "planner", "k = 0"
# Requests, tokens of each, and the least ratio to the best fixed k.
RUNS = {"new": (16, 64, 0.97), "restarted": (16, 64, 0.97), "long": (32, 192, 1.05)}
LEAST_OF_TARGET = 0.97


@dataclass(frozen=True)
class Cell:
    """What one comparison is made in."""

    draft: str
    sessions: int
    temperature: float

    def __str__(self) -> str:
        return f"{self.draft} {self.sessions} T={self.temperature:g}"


CELLS = [
    *itertools.starmap(Cell, itertools.product(["good"], (1, 4, 8), (0.0, 1.0))),
    *itertools.starmap(Cell, itertools.product(["random"], (1, 4, 8), (0.0,))),
]


@dataclass(frozen=True)
class Result:
    """The tokens per second of each turn by contender, and whether all gave the same tokens."""

    rates: Mapping[str, Sequence[float]]
    same_tokens: bool

    def over(self, name: str) -> float:
        """Return the median of the planner over another."""
        return median(a / b for a, b in zip(self.rates[PLANNER], self.rates[name], strict=True))

    @property
    def best(self) -> str:
        """The best of the fixed k."""
        return max((name for name in self.rates if name != PLANNER), key=lambda name: median(self.rates[name]))


class Service:
    """Workers that all share, and coordinators in front of them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._num_started = 0

    async def start_workers(self, running: AsyncExitStack) -> None:
        """Start the target and both drafts, and stop them with `running`."""
        random_draft = self._directory / "random"
        save_random_draft(random_draft)
        for name, model in (("target", ""), ("good", EMBEDDED_DRAFT), ("random", str(random_draft))):
            kind = ["draft-worker", "--model", model] if model else ["target-worker"]
            child = self._child(name, [*kind, "--listen", f"unix:{self._directory}/{name}.socket"], "workers")
            running.push_async_callback(child.stop)
            await child.start()

    @asynccontextmanager
    async def coordinator(self, draft: str, cache: str) -> AsyncIterator[AsyncClient]:
        """Run a coordinator that keeps what it learns in the directory of this name."""
        self._num_started += 1
        address = f"unix:{self._directory}/{self._num_started}"
        workers = [
            f"--{kind}=unix:{self._directory}/{name}.socket" for kind, name in (("target", "target"), ("draft", draft))
        ]
        child = self._child("coordinator", ["coordinator", "--listen", address, *workers], cache)
        await child.start()
        try:
            async with AsyncClient(address) as client:
                yield client
        finally:
            await child.stop()

    def forget(self, cache: str) -> None:
        """Forget what was kept there."""
        shutil.rmtree(self._directory / cache, ignore_errors=True)

    def _child(self, name: str, arguments: Sequence[str], cache: str) -> Child:
        variables = {"XDG_CACHE_HOME": str(self._directory / cache), "PYTHONPATH": str(Path(__file__).parents[1])}
        return Child(name, [sys.executable, "-P", "-m", "specd", *arguments, "--metrics-listen", "none"], variables)


async def ask(
    client: AsyncClient, cell: Cell, prompts: Sequence[str], count: int, max_tokens: int, k: int | None
) -> tuple[float, list[tuple[int, ...]]]:
    """Return tokens per second of all requests together, and the tokens of each."""
    waiting, texts, total = list(range(count)), dict[int, tuple[int, ...]](), 0

    async def session() -> None:
        nonlocal total
        while waiting:
            i, tokens = waiting.pop(0), list[int]()
            async for event in client.generate(
                prompts[i % len(prompts)],
                max_tokens=max_tokens,
                temperature=cell.temperature,
                seed=i,
                num_draft_tokens=k,
            ):
                if isinstance(event, Delta):
                    tokens += [token.id for token in event.tokens]
            texts[i] = tuple(tokens)
            total += len(tokens)

    begun_at = time.perf_counter()
    await asyncio.gather(*(session() for _ in range(cell.sessions)))
    return total / (time.perf_counter() - begun_at), [texts[i] for i in range(count)]


async def compare(
    service: Service, cell: Cell, runs: Sequence[str], prompts: Sequence[str], ks: Sequence[int], turns: int
) -> dict[str, Result]:
    """Return the results of a cell by run. The first turn is not counted: it fills the workers' prefix caches."""
    ks = ks if cell.draft == "good" else (0,)
    sizes = dict.fromkeys(RUNS[run][:2] for run in runs)
    rates = {run: {name: list[float]() for name in (PLANNER, *(f"k = {k}" for k in ks))} for run in runs}
    texts: dict[tuple[int, int], list[list[tuple[int, ...]]]] = {size: [] for size in sizes}
    for turn in range(turns + 1):
        for run in runs:
            if run != "restarted":
                service.forget("planner")
            async with service.coordinator(cell.draft, "planner") as client:
                rate, said = await ask(client, cell, prompts, *RUNS[run][:2], None)
            rates[run][PLANNER] += [rate] * (turn > 0)
            texts[RUNS[run][:2]].append(said)
        for size in sizes:
            for k in rotated(ks, turn):
                async with service.coordinator(cell.draft, "fixed") as client:
                    rate, said = await ask(client, cell, prompts, *size, k)
                texts[size].append(said)
                for run in runs:
                    if RUNS[run][:2] == size:
                        rates[run][f"k = {k}"] += [rate] * (turn > 0)
    same = {size: all(said == own[0] for said in own) for size, own in texts.items()}
    return {run: Result(rates[run], same[RUNS[run][:2]]) for run in runs}


async def measure(options: argparse.Namespace) -> dict[str, Result]:
    """Return the results of all cells and runs, by their names."""
    prompts = list(load_prompts(options.prompts).values())
    results: dict[str, Result] = {}
    async with AsyncExitStack() as running:
        service = Service(Path(running.enter_context(tempfile.TemporaryDirectory(prefix="specd-"))))
        await service.start_workers(running)
        for cell in CELLS:
            if str(cell) not in options.cells:
                continue
            runs = [run for run in options.runs if cell.draft == "good" or run != "long"]
            for run, result in (await compare(service, cell, runs, prompts, options.k, options.turns)).items():
                results[f"{cell} {run}"] = result
                shown = {name: round(median(own), 1) for name, own in result.rates.items()}
                console().print(
                    f"{cell} {run}: {result.over(result.best):.3f} of {result.best}", shown, highlight=False
                )
    return results


def main() -> None:
    """Measure, print a table, write JSON; fail if the planner loses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cells = [str(cell) for cell in CELLS]
    parser.add_argument("--cells", nargs="+", choices=cells, default=cells, help="only these cells")
    parser.add_argument("--runs", nargs="*", choices=[*RUNS], default=[*RUNS])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("-k", type=int, nargs="*", default=[0, 1, 2, 3, 4, 5, 7], help="the fixed numbers of tokens")
    held_out = Path(__file__).parent / "unseen" / "held_out"
    parser.add_argument("--prompts", type=Path, default=held_out, help="a directory with a prompt in each file")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    os.environ.setdefault("SPECD_LOG_LEVEL", "warning")
    results = asyncio.run(measure(options))

    table = new_table("planner over", ["best fixed k", "which", "target alone", "tokens"])
    loses = False
    for name, result in results.items():
        over_best, over_target = result.over(result.best), result.over(TARGET_ONLY)
        least = RUNS[name.split()[-1]][2] if name.startswith("good") else LEAST_OF_TARGET
        loses |= over_best < least or not result.same_tokens
        same = "same" if result.same_tokens else "DIFFERENT"
        table.add_row(name, f"{over_best:.2f}", result.best, f"{over_target:.2f}", same)
    console().print(table)
    if options.json is not None:
        about = environment(prompts=[], turns=options.turns)
        rows = {name: {"rates": result.rates, "same_tokens": result.same_tokens} for name, result in results.items()}
        options.json.write_text(json.dumps({"environment": about, "results": rows}, indent=1) + "\n")
    sys.exit(loses)


if __name__ == "__main__":
    main()

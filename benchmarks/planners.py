"""Planners side by side on the same requests: ours, that of another checkout, Ollama's controller, and fixed k.

    git worktree add ../base 9b8aa73
    python benchmarks/planners.py --base ../base [--repeats 5] [--cells 'good 1 session T=0 0 ms' …] [--json FILE]

A cell is a draft (the embedded one, or one of random weights), a number of sessions, a temperature, and a delay each
way between coordinator and draft. All share one target worker, because two processes of the same program can differ by
8 % as long as they run. The other checkout has its own draft workers, whose measured costs only its planner can read;
Ollama's controller and fixed k run on ours. In each cell the contenders take turns on the same prompts; ratios are
medians over the turns. All give the same tokens.
Exit code 1 if ours is below 0.98 of the base's in a cell, below 0.97 of the target alone, or gives other tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import selectors
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from never_slower import save_random_draft
from wire_faults import Wire

from specd.bench.environment import console, environment, new_table
from specd.bench.prompts import load_prompts
from specd.client import NO_RETRIES, AsyncClient
from specd.settings import EMBEDDED_DRAFT
from specd.supervisor import Child

OURS, BASE, OLLAMA, TARGET_ONLY, GIVEN_K = "ours", "base", "Ollama's", "target alone", "given k"
LEAST_OF_BASE, LEAST_OF_TARGET = 0.98, 0.97
FIXED = (2, 4, 7)
DELAYS_MS = (0, 5)
TEMPERATURES = (0.0, 1.0)
SESSIONS = (1, 4, 8)


@dataclass(frozen=True)
class Cell:
    """What one comparison is made in."""

    draft: str
    sessions: int
    temperature: float
    delay_ms: int

    def __str__(self) -> str:
        plural = "session" if self.sessions == 1 else "sessions"
        return f"{self.draft} {self.sessions} {plural} T={self.temperature:g} {self.delay_ms} ms"


CELLS = [
    Cell(draft, sessions, temperature, delay)
    for draft, sessions, temperature, delay in itertools.product(("good", "random"), SESSIONS, TEMPERATURES, DELAYS_MS)
]


@dataclass(frozen=True)
class Candidate:
    """A coordinator for each draft and delay, and the k that requests ask for."""

    clients: Mapping[tuple[str, int], AsyncClient]
    k: int | None = None

    async def run(self, cell: Cell, prompts: Sequence[str], max_tokens: int) -> tuple[float, list[tuple[int, ...]]]:
        """Return tokens per second while all sessions have something to decode, and the tokens of each prompt."""
        client = self.clients[cell.draft, cell.delay_ms]
        waiting = list(enumerate([*prompts] * cell.sessions))
        texts: dict[int, tuple[int, ...]] = {}
        arrivals: list[tuple[float, int]] = []  # of tokens after a prompt's first
        decode_seconds = 0.0
        ended_at: list[float] = []

        async def session() -> None:
            nonlocal decode_seconds
            while waiting:
                number, prompt = waiting.pop(0)
                tokens: list[int] = []
                first_at = 0.0
                stream = client.generate(
                    prompt,
                    temperature=cell.temperature,
                    seed=number % len(prompts),
                    max_tokens=max_tokens,
                    num_draft_tokens=self.k,
                )
                async for response in stream.messages():
                    now = time.perf_counter()
                    if tokens:
                        arrivals.append((now, len(response.tokens)))
                    else:
                        first_at = now
                    tokens += [token.id for token in response.tokens]
                decode_seconds += time.perf_counter() - first_at
                texts[number] = tuple(tokens)
            ended_at.append(time.perf_counter())

        begun_at = time.perf_counter()
        await asyncio.gather(*(session() for _ in range(cell.sessions)))
        until = min(ended_at)
        seconds = decode_seconds if cell.sessions == 1 else until - begun_at
        return sum(count for at, count in arrivals if at <= until) / seconds, [texts[i] for i in sorted(texts)]


async def start_contenders(running: AsyncExitStack, base: Path | None) -> dict[str, Candidate]:
    """Start the workers, and a coordinator for each planner, draft and delay."""
    directory = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="specd-")))
    random_draft = directory / "random"
    save_random_draft(random_draft)
    drafts = {"good": EMBEDDED_DRAFT, "random": str(random_draft)}

    async def start(name: str, checkout: Path, *command: str) -> None:
        cache = directory / f"cache-{checkout.name}"
        environment = {"PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(cache)}
        # -P: Python would look for specd where this runs, before the checkout.
        child = Child(name, [sys.executable, "-P", *command, "--metrics-listen", "none"], environment)
        running.push_async_callback(child.stop)
        await child.start()

    checkouts = {OURS: Path(__file__).parents[1], **({BASE: base} if base else {})}
    # The planner learns from sessions with a given k, too: they have coordinators of their own.
    planners = {
        OURS: (OURS, ["-m", "specd"]),
        GIVEN_K: (OURS, ["-m", "specd"]),
        OLLAMA: (OURS, [str(Path(__file__).with_name("ollama_coordinator.py"))]),
    }
    if base:
        planners[BASE] = (BASE, ["-m", "specd"])
    sockets: dict[tuple[str, str, int], str] = {}
    target = f"unix:{directory}/target"
    await start("target", checkouts[OURS], "-m", "specd", "target-worker", "--listen", target)
    for name, checkout in checkouts.items():
        for draft, model in drafts.items():
            path = f"{directory}/{name}-{draft}"
            await start(draft, checkout, "-m", "specd", "draft-worker", "--model", model, "--listen", f"unix:{path}")
            sockets[name, draft, 0] = path
            for delay in filter(None, DELAYS_MS):
                sockets[name, draft, delay] = f"{path}-{delay}"
                await running.enter_async_context(Wire(f"{path}-{delay}", path, delay / 1000))
    clients: dict[str, dict[tuple[str, int], AsyncClient]] = {name: {} for name in planners}
    for number, (planner, draft, delay) in enumerate(itertools.product(planners, drafts, DELAYS_MS)):
        name, command = planners[planner]
        address = f"unix:{directory}/coordinator-{number}"
        workers = ["--target", target, "--draft", f"unix:{sockets[name, draft, delay]}"]
        await start(planner, checkouts[name], *command, "coordinator", "--listen", address, *workers)
        clients[planner][draft, delay] = await running.enter_async_context(AsyncClient(address, retries=NO_RETRIES))
    given = clients.pop(GIVEN_K)
    return {
        **{name: Candidate(own) for name, own in clients.items()},
        TARGET_ONLY: Candidate(given, 0),
        **{f"k = {k}": Candidate(given, k) for k in FIXED},
    }


async def measure(options: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Return the tokens per second of each turn, by cell and contender."""
    prompts = [text for text in load_prompts().values() if len(text) < 2000][:: options.every]
    results: dict[str, dict[str, object]] = {}
    async with AsyncExitStack() as running:
        contenders = await start_contenders(running, options.base)
        cells = [cell for cell in CELLS if not options.cells or str(cell) in options.cells]
        for cell in cells:
            own = {
                name: contender
                for name, contender in contenders.items()
                if cell.draft == "good" or not (contender.k and contender.k > min(FIXED))
            }
            rates: dict[str, list[float]] = {name: [] for name in own}
            texts = []
            for turn in range(options.repeats + 1):
                # The first turn warms up: caches of prompts, and what the planners know of the pair.
                names = list(own)[turn % len(own) :] + list(own)[: turn % len(own)]
                for name in names:
                    rate, said = await own[name].run(cell, prompts, options.max_tokens)
                    texts.append(said)
                    if turn:
                        rates[name].append(rate)
            results[str(cell)] = {"tokens_per_second": rates, "same_tokens": all(said == texts[0] for said in texts)}
            console().print(f"{cell}:", {name: round(median(r), 1) for name, r in rates.items()}, highlight=False)
    return results


def compare(rates: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the medians of ours over the others, turn by turn; of the fixed k, over the best."""
    fixed = [name for name in rates if name.startswith("k = ")]
    best = max(fixed, key=lambda name: median(rates[name]))
    others = {name: name for name in (BASE, TARGET_ONLY, OLLAMA) if name in rates} | {"best fixed k": best}
    return {
        label: median(a / b for a, b in zip(rates[OURS], rates[name], strict=True)) for label, name in others.items()
    }


def main() -> None:
    """Measure, print a table, write JSON; fail if ours loses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--base", type=lambda name: Path(name).resolve(), help="another checkout, whose planner is measured too"
    )
    parser.add_argument("--cells", nargs="*", help="only these cells, as the table names them")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each contender in each cell")
    parser.add_argument("--every", type=int, default=3, help="use every so many of the prompts")
    parser.add_argument("-n", "--max-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    os.environ.setdefault("SPECD_LOG_LEVEL", "warning")
    # select() waits for microseconds, where epoll rounds up to milliseconds, and the delay with them.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        results = runner.run(measure(options))

    ratios = {cell: compare(result["tokens_per_second"]) for cell, result in results.items()}  # type: ignore[arg-type]
    columns = [
        name for name in (BASE, TARGET_ONLY, OLLAMA, "best fixed k") if any(name in own for own in ratios.values())
    ]
    table = new_table("ours over", [*columns, "tokens"])
    for cell, own in ratios.items():
        same = "same" if results[cell]["same_tokens"] else "DIFFERENT"
        table.add_row(cell, *(f"{own[name]:.2f}" for name in columns), same)
    console().print(table)
    if options.json is not None:
        about = environment(prompts=[], repeats=options.repeats, max_tokens=options.max_tokens)
        options.json.write_text(
            json.dumps({"environment": about, "ratios": ratios, "results": results}, indent=1) + "\n"
        )
    sys.exit(
        any(
            own.get(BASE, 1.0) < LEAST_OF_BASE or own[TARGET_ONLY] < LEAST_OF_TARGET or not results[cell]["same_tokens"]
            for cell, own in ratios.items()
        )
    )


if __name__ == "__main__":
    main()

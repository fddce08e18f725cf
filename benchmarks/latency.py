"""The draft worker at the end of a longer wire: fixed k, and adaptive k.

    python benchmarks/latency.py [--delay-ms 5] [-k 3 5 7 11 15] [--num-prompts 8] [-n 128] [--json FILE]

Messages between the coordinator and the draft worker are delayed by --delay-ms each way. Stages are means over the
rounds of a session, which add up, and then medians over sessions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import selectors
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.table import Table
from wire_faults import Wire

from specd.bench.contenders import Contender, Specd
from specd.bench.environment import console, environment, new_table
from specd.bench.prompts import encode, load_prompts, short, spread
from specd.bench.sample import Sample, have_same_tokens, median_ratio
from specd.bench.setup import SPECD, Setup
from specd.bench.turns import take_turns
from specd.rpc.client import RawClient
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import NO_PREFIX_CACHE, Stack

TOKENIZER = Path(EMBEDDED_TARGET) / "tokenizer.json"
TARGET_ONLY, ADAPTIVE = "target alone", "adaptive"
STAGES = ("draft", "verify", "queue", "wire", "coordinator")


@dataclass(frozen=True)
class LatencyResult:
    """How a contender does; `speedup` is over the target alone."""

    tokens_per_second: float
    speedup: float
    tokens_per_round: float
    proposed_per_round: float
    accepted_per_proposed: float | None
    round_milliseconds: dict[str, float]


async def measure(prompts: Mapping[str, list[int]], options: argparse.Namespace) -> dict[str, list[Sample]]:
    """Return the samples of all contenders, the target alone first."""
    async with AsyncExitStack() as running:
        directory = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="specd-bench-")))
        # What steps cost is measured anew: it must not be what an earlier run, or another one beside it, has left.
        stack = Stack(
            target=EMBEDDED_TARGET,
            draft=EMBEDDED_DRAFT,
            environment={**NO_PREFIX_CACHE, "XDG_CACHE_HOME": str(directory)},
        )
        draft = stack.coordinator.command.index("--draft") + 1
        path = stack.coordinator.command[draft].removeprefix("unix:")
        detour = str(directory / "draft")
        await running.enter_async_context(Wire(detour, path, options.delay_ms / 1000))
        stack.coordinator.command[draft] = f"unix:{detour}"
        await running.enter_async_context(stack)

        client = await running.enter_async_context(RawClient(stack.address))
        contenders: dict[str, Contender] = {
            TARGET_ONLY: Specd(client, Setup(SPECD, 0)),
            **{f"k = {k}": Specd(client, Setup(SPECD, k)) for k in options.num_draft_tokens},
            ADAPTIVE: Specd(client, Setup(SPECD, None)),
        }
        for contender in contenders.values():
            for number, token_ids in enumerate(list(prompts.values())[: options.warm_up]):
                await contender.decode("warm-up", number, token_ids, options.max_tokens)
        return await take_turns(
            contenders, prompts, repeats=options.repeats, max_tokens=options.max_tokens, title="latency"
        )


def summarise(samples: Sequence[Sample], baseline: Sequence[Sample]) -> LatencyResult:
    """Take medians over the samples, and counts over all rounds."""
    rounds = [round_ for sample in samples for round_ in sample.rounds]
    proposed = sum(sample.proposed_tokens for sample in samples)
    stages = {
        stage: median(
            1000 * mean(getattr(round_, f"{stage}_seconds") for round_ in sample.rounds)
            for sample in samples
            if sample.rounds
        )
        for stage in STAGES
    }
    total = median(1000 * sample.decode_seconds / len(sample.rounds) for sample in samples if sample.rounds)
    return LatencyResult(
        tokens_per_second=median(sample.tokens_per_second for sample in samples),
        speedup=median_ratio(samples, baseline),
        tokens_per_round=sum(len(sample.token_ids) - 1 for sample in samples) / len(rounds),
        proposed_per_round=proposed / len(rounds),
        accepted_per_proposed=sum(sample.accepted_tokens for sample in samples) / proposed if proposed else None,
        round_milliseconds={**stages, "total": total},
    )


def compare(samples: Mapping[str, Sequence[Sample]], results: Mapping[str, LatencyResult]) -> dict[str, float]:
    """Return the ratios of adaptive k to the best fixed k and to the target alone, of tokens per second."""
    ratios = {f"{ADAPTIVE} / {TARGET_ONLY}": results[ADAPTIVE].speedup}
    if fixed := [name for name in samples if name not in {TARGET_ONLY, ADAPTIVE}]:
        best = max(fixed, key=lambda name: results[name].speedup)
        ratios[f"{ADAPTIVE} / best fixed k ({best})"] = median_ratio(samples[ADAPTIVE], samples[best])
    return ratios


def table(results: Mapping[str, LatencyResult], title: str) -> Table:
    """Lay the results out."""
    measures = ("tokens\n/s", "speed\n-up", "tokens\n/round", "proposed\n/round", "accepted")
    stages = [("coord." if stage == "coordinator" else stage) + "\nms" for stage in STAGES]
    table = new_table(title, (*measures, *stages, "round\nms"))
    for name, result in results.items():
        accepted = result.accepted_per_proposed
        table.add_row(
            name,
            f"{result.tokens_per_second:.1f}",
            f"{result.speedup:.2f}",
            f"{result.tokens_per_round:.2f}",
            f"{result.proposed_per_round:.2f}",
            f"{accepted:.1%}" if accepted is not None else "",
            *(f"{milliseconds:.1f}" for milliseconds in result.round_milliseconds.values()),
        )
    return table


def main() -> None:
    """Measure, print a table, write JSON; fail if the tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay-ms", type=float, default=5.0, help="added each way to the draft worker; 0 for none")
    parser.add_argument("-k", "--num-draft-tokens", type=int, nargs="*", default=[3, 5, 7, 11, 15])
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--warm-up", type=int, default=2, help="sessions of each contender before those that count")
    parser.add_argument("-n", "--max-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write the results and every sample to this file")
    options = parser.parse_args()
    os.environ.setdefault("SPECD_LOG_LEVEL", "warning")

    prompts = spread(short(encode(load_prompts(), TOKENIZER.read_bytes())), options.num_prompts)
    # select() waits for microseconds, where epoll rounds up to milliseconds, and the delay with them.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        samples = runner.run(measure(prompts, options))
    results = {name: summarise(own, samples[TARGET_ONLY]) for name, own in samples.items()}
    ratios = compare(samples, results)
    same = have_same_tokens(samples.values())

    output = console()
    output.print(table(results, f"{options.delay_ms:g} ms each way"))
    for name, ratio in ratios.items():
        output.print(f"{name}: [bold]{ratio:.2f}[/]", highlight=False)
    output.print(f"all contenders gave {'the same' if same else '[bold red]DIFFERENT[/]'} tokens", highlight=False)
    if options.json is not None:
        report: dict[str, Any] = {
            "environment": {
                **environment(prompts=list(prompts), repeats=options.repeats, max_tokens=options.max_tokens),
                "delay_ms": options.delay_ms,
                "warm_up": options.warm_up,
            },
            "results": {name: asdict(result) for name, result in results.items()},
            "comparison": ratios,
            "same_tokens": same,
            "samples": {name: [sample.as_record() for sample in own] for name, own in samples.items()},
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(not same)


if __name__ == "__main__":
    main()

"""The draft worker at the end of a longer wire: fixed k, and adaptive k with and without draft-ahead.

    python benchmarks/latency.py [--delay-ms 5] [-k 3 5 7 11 15] [--num-prompts 8] [-n 128] [--json FILE]

Everything between the coordinator and the draft worker is held back for --delay-ms each way. There are three
coordinators on the same two workers, used one at a time: one for what is fixed, and one each for adaptive k with
draft-ahead and without, so that neither learns from what the others do.

Stages are means over the rounds of a session, which add up, and then medians over sessions. `draft` is what a round
waits for the draft worker's model: for a proposal that was ahead, nothing.
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

import paired
from rich.table import Table
from wire_delay import DelayingProxy

from specd.bench.contenders import Contender, Specd
from specd.bench.environment import console, environment
from specd.bench.sample import Sample
from specd.bench.setup import SPECD, Setup
from specd.bench.turns import take_turns
from specd.client import Client
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import NO_PREFIX_CACHE, Child, Stack

TARGET_ONLY, AHEAD_OFF, AHEAD_ON = "target alone", "adaptive, ahead off", "adaptive, ahead on"
STAGES = ("draft", "verify", "queue", "wire", "coordinator")


@dataclass(frozen=True)
class Result:
    """How a contender does; `speedup` is over the target alone."""

    tokens_per_second: float
    speedup: float
    tokens_per_round: float
    proposed_per_round: float
    accepted_per_proposed: float | None
    ahead: float  # part of the rounds whose proposal was there before it was asked for
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
        await running.enter_async_context(DelayingProxy(detour, path, options.delay_ms / 1000))
        stack.coordinator.command[draft] = f"unix:{detour}"
        command = list(stack.coordinator.command)
        await running.enter_async_context(stack)

        addresses = {"": stack.address}
        for name, setting in ((AHEAD_OFF, "never"), (AHEAD_ON, "auto")):
            child = Child(f"coordinator ({name})", list(command), {"SPECD_COORDINATOR_DRAFT_AHEAD": setting})
            running.push_async_callback(child.stop)
            await child.start()
            addresses[name] = child.facts["address"]
        clients = {name: await running.enter_async_context(Client(address)) for name, address in addresses.items()}
        contenders: dict[str, Contender] = {
            TARGET_ONLY: Specd(clients[""], Setup(SPECD, 0)),
            **{f"k = {k}": Specd(clients[""], Setup(SPECD, k)) for k in options.num_draft_tokens},
            **{name: Specd(clients[name], Setup(SPECD, None)) for name in (AHEAD_OFF, AHEAD_ON)},
        }
        for contender in contenders.values():
            for number, token_ids in enumerate(list(prompts.values())[: options.warm_up]):
                await contender.decode("warm-up", number, token_ids, options.max_tokens)
        return await take_turns(
            contenders, prompts, repeats=options.repeats, max_tokens=options.max_tokens, title="latency"
        )


def summarise(samples: Sequence[Sample], baseline: Sequence[Sample]) -> Result:
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
    return Result(
        tokens_per_second=median(sample.tokens_per_second for sample in samples),
        speedup=paired.median_ratio(samples, baseline),
        tokens_per_round=sum(len(sample.token_ids) - 1 for sample in samples) / len(rounds),
        proposed_per_round=proposed / len(rounds),
        accepted_per_proposed=sum(sample.accepted_tokens for sample in samples) / proposed if proposed else None,
        ahead=mean(round_.was_ahead for round_ in rounds),
        round_milliseconds={**stages, "total": total},
    )


def compare(samples: Mapping[str, Sequence[Sample]], results: Mapping[str, Result]) -> dict[str, float]:
    """Put draft-ahead beside none, and adaptive k beside the best fixed one; ratios of tokens per second."""
    fixed = [name for name in samples if name not in {TARGET_ONLY, AHEAD_OFF, AHEAD_ON}]
    ratios = {f"{AHEAD_ON} / off": paired.median_ratio(samples[AHEAD_ON], samples[AHEAD_OFF])}
    if fixed:
        best = max(fixed, key=lambda name: results[name].speedup)
        for name in (AHEAD_OFF, AHEAD_ON):
            ratios[f"{name} / best fixed k ({best})"] = paired.median_ratio(samples[name], samples[best])
    for name in (AHEAD_OFF, AHEAD_ON):
        ratios[f"{name} / {TARGET_ONLY}"] = results[name].speedup
    return ratios


def table(results: Mapping[str, Result], title: str) -> Table:
    """Lay the results out."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(title)
    measures = ("tokens\n/s", "speed\n-up", "tokens\n/round", "proposed\n/round", "accepted", "ahead")
    stages = [("coord." if stage == "coordinator" else stage) + "\nms" for stage in STAGES]
    for header in (*measures, *stages, "round\nms"):
        table.add_column(header, justify="right", no_wrap=True)
    for name, result in results.items():
        accepted = result.accepted_per_proposed
        table.add_row(
            name,
            f"{result.tokens_per_second:.1f}",
            f"{result.speedup:.2f}",
            f"{result.tokens_per_round:.2f}",
            f"{result.proposed_per_round:.2f}",
            f"{accepted:.1%}" if accepted is not None else "",
            f"{result.ahead:.0%}",
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

    prompts = paired.encode_prompts(options.num_prompts)
    # select() waits for microseconds, where epoll rounds up to milliseconds, and the delay with them.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        samples = runner.run(measure(prompts, options))
    results = {name: summarise(own, samples[TARGET_ONLY]) for name, own in samples.items()}
    ratios = compare(samples, results)
    same = paired.have_same_tokens(samples)

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
            "samples": paired.records(samples),
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(not same)


if __name__ == "__main__":
    main()

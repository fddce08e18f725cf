"""Runs the contenders on the prompts, and reports."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from specd import __version__
from specd.bench.contenders import Contender, MlxLm, Specd
from specd.bench.sample import Result, Sample, summarise
from specd.client import Client
from specd.supervisor import Stack
from specd.worker.model import load

_STAGES = {"draft": "draft", "verify": "verify", "queue": "queue", "wire_and_coordinator": "wire+coord."}


@dataclass(frozen=True)
class Options:
    """What to measure."""

    target: str
    draft: str
    prompts: dict[str, str]
    num_draft_tokens: Sequence[int]
    max_tokens: int
    repeats: int
    blas: str


def run_bench(options: Options, json_path: Path | None) -> bool:
    """Measure, print a table, write JSON. Returns whether all contenders gave the same tokens.

    The contenders take turns prompt by prompt, each repeat starting with another one, so that what else the machine
    does falls on all of them. Nothing of specd computes while mlx-lm does, and the other way round.
    """
    target, draft = load(options.target, blas=options.blas), load(options.draft, blas=options.blas)
    prompt_ids = _encode(target.tokenizer_json, options.prompts)
    in_process = [MlxLm(target, draft, k) for k in (0, *options.num_draft_tokens)]
    samples = asyncio.run(_measure(in_process, prompt_ids, options))
    baseline = next(iter(samples.values()))
    results = [summarise(name, own, baseline) for name, own in samples.items()]
    same = all(
        [sample.token_ids for sample in own] == [sample.token_ids for sample in baseline] for own in samples.values()
    )
    console = Console()
    console.print(_table(results))
    verdicts = compare(results)
    for name, value in verdicts.items():
        console.print(f"{name}: [bold]{value:.2f}[/]", highlight=False)
    console.print(f"all contenders gave {'the same' if same else '[bold red]DIFFERENT[/]'} tokens", highlight=False)
    if json_path is not None:
        report = {
            "environment": _environment(options),
            "results": [dataclasses.asdict(result) for result in results],
            "comparison": verdicts,
            "same_tokens": same,
            "samples": {name: [sample.as_record() for sample in own] for name, own in samples.items()},
        }
        json_path.write_text(json.dumps(report, indent=1) + "\n")
    return same


def compare(results: Sequence[Result]) -> dict[str, float]:
    """Put the best of specd beside its target alone and beside the best of mlx-lm."""
    specd = [result for result in results if result.name.startswith("specd")]
    mlx_lm = [result for result in results if result.name.startswith("mlx-lm")]
    best, best_mlx_lm = (max(side[1:], key=lambda result: result.speedup) for side in (specd, mlx_lm))
    overhead = best.round_milliseconds["wire_and_coordinator"]
    return {
        f"best specd ({best.name}) / specd with the target alone": best.speedup,
        f"best specd / best mlx-lm ({best_mlx_lm.name})": best.speedup / best_mlx_lm.speedup,
        "time to first token, best specd / mlx-lm": best.time_to_first_token_seconds
        / mlx_lm[0].time_to_first_token_seconds,
        "wire and coordinator, ms a round": overhead,
    }


async def _measure(
    in_process: Sequence[MlxLm], prompt_ids: dict[str, list[int]], options: Options
) -> dict[str, list[Sample]]:
    """Return the samples by contender, specd with the target alone first, all in the same order."""
    async with Stack(target=options.target, draft=options.draft) as stack, Client(stack.address) as client:
        through_grpc = [Specd(client, k) for k in (0, *options.num_draft_tokens)]
        return await _take_turns([*through_grpc, *in_process], prompt_ids, options)


async def _take_turns(
    contenders: list[Contender], prompt_ids: dict[str, list[int]], options: Options
) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("warming up", total=options.repeats * len(prompt_ids) * len(contenders))
        warm_up = next(iter(prompt_ids.values()))
        for contender in contenders:
            await contender.decode("", 0, warm_up, 16)
        for repeat in range(options.repeats):
            turn = contenders[repeat % len(contenders) :] + contenders[: repeat % len(contenders)]
            for prompt, token_ids in prompt_ids.items():
                for contender in turn:
                    progress.update(task, advance=1, description=contender.name)
                    sample = await contender.decode(prompt, repeat, token_ids, options.max_tokens)
                    samples[contender.name].append(sample)
    return samples


def _table(results: Sequence[Result]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("medians")
    for header in ("tokens/s", "speed-up", "accepted", "tokens/round", "first token", *_STAGES.values()):
        table.add_column(header, justify="right")
    for result in results:
        stages = result.round_milliseconds
        table.add_row(
            result.name,
            f"{result.tokens_per_second:.1f}",
            f"{result.speedup:.2f}",
            f"{result.acceptance_rate:.1%}" if result.acceptance_rate is not None else "",
            f"{result.acceptance_length:.2f}" if result.acceptance_length is not None else "",
            f"{1000 * result.time_to_first_token_seconds:.0f} ms",
            *(f"{stages[name]:.2f} ms" if stages else "" for name in _STAGES),
        )
    return table


def _encode(tokenizer_json: bytes, prompts: dict[str, str]) -> dict[str, list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    return {name: tokenizer.encode(prompt).ids for name, prompt in prompts.items()}


def _environment(options: Options) -> dict[str, object]:
    return {
        "specd": __version__,
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "grpcio": version("grpcio"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "blas": options.blas,
        "target": Path(options.target).name,
        "draft": Path(options.draft).name,
        "max_tokens": options.max_tokens,
        "repeats": options.repeats,
        "prompts": list(options.prompts),
    }

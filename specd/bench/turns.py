"""Turns of the contenders, so that other load on the machine slows all of them alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from specd.bench.contenders import Contender
from specd.bench.sample import Sample

Name = TypeVar("Name")


def rotated(items: Iterable[Name], turn: int) -> list[Name]:
    """Return the items in their order of this turn: another one begins in each."""
    all_items = [*items]
    begin = turn % len(all_items)
    return all_items[begin:] + all_items[:begin]


async def take_turns(
    contenders: Mapping[Name, Contender],
    prompts: Mapping[str, list[int]],
    *,
    repeats: int,
    max_tokens: int,
    title: str = "",
    samples: dict[Name, list[Sample]] | None = None,
) -> dict[Name, list[Sample]]:
    """Let the contenders decode each prompt in turn, starting with a different contender each time.

    Returns their samples, all in the same order. They are added to `samples` as they come, so that a caller which is
    interrupted has them. After each prompt, it prints the median speeds so far.
    """
    samples = {} if samples is None else samples
    samples |= {name: [] for name in contenders}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=repeats * len(prompts) * len(contenders))
        turn = 0
        for repeat in range(repeats):
            for prompt, token_ids in prompts.items():
                for name in rotated(contenders, turn):
                    progress.update(task, advance=1, description=f"{title} {contenders[name].setup.name}".strip())
                    samples[name].append(await contenders[name].decode(prompt, repeat, token_ids, max_tokens))
                turn += 1
                done = f"{turn} of {repeats * len(prompts)} prompts, tokens/s: {_speeds(contenders, samples)}"
                console.print(f"{title} {done}".strip(), style="dim", highlight=False, soft_wrap=True)
    return samples


def _speeds(contenders: Mapping[Name, Contender], samples: Mapping[Name, Sequence[Sample]]) -> str:
    """Return the median speed of each contender."""
    speeds = {name: median(sample.tokens_per_second for sample in own) for name, own in samples.items()}
    return ", ".join(f"{contenders[name].setup.name} {speed:.1f}" for name, speed in speeds.items())

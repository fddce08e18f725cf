"""Turns of the contenders, so that other load on the machine slows all of them alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from specd.bench.contenders import Contender
from specd.bench.environment import say
from specd.bench.sample import Sample

Name = TypeVar("Name")


async def take_turns(
    contenders: Mapping[Name, Contender],
    prompts: Mapping[str, list[int]],
    *,
    repeats: int,
    max_tokens: int,
    title: str = "",
) -> dict[Name, list[Sample]]:
    """Let the contenders decode each prompt in turn, starting with a different contender each time.

    Returns their samples, all in the same order.
    """
    samples: dict[Name, list[Sample]] = {name: [] for name in contenders}
    names = list(contenders)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=repeats * len(prompts) * len(names))
        turn = 0
        for repeat in range(repeats):
            for prompt, token_ids in prompts.items():
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    progress.update(task, advance=1, description=f"{title} {contenders[name].setup.name}".strip())
                    samples[name].append(await contenders[name].decode(prompt, repeat, token_ids, max_tokens))
                turn += 1
                if not console.is_terminal:  # where the bar is not drawn
                    say(f"{turn} of {repeats * len(prompts)} prompts decoded by each contender")
    return samples

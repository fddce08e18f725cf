"""Contenders that take turns on the same prompts, and what their samples say about each other."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from specd import __version__
from specd.bench.contenders import Contender
from specd.bench.prompts import load_prompts
from specd.bench.sample import Sample
from specd.settings import EMBEDDED_TARGET

MAX_PROMPT_TOKENS = 512
WIDTH = 120

Samples = Mapping[str, Sequence[Sample]]


def encode_prompts(count: int) -> dict[str, list[int]]:
    """Return the ids of so many of the prompts that are not long, from all over them."""
    tokenizer = Tokenizer.from_file(str(Path(EMBEDDED_TARGET) / "tokenizer.json"))
    prompts = {name: tokenizer.encode(text).ids for name, text in load_prompts().items()}
    names = [name for name, ids in prompts.items() if len(ids) <= MAX_PROMPT_TOKENS]
    count = min(count, len(names))
    return {name: prompts[name] for name in (names[i * len(names) // count] for i in range(count))}


async def take_turns(
    contenders: Mapping[str, Contender], prompts: Mapping[str, list[int]], *, repeats: int, max_tokens: int, title: str
) -> dict[str, list[Sample]]:
    """Let the contenders decode each prompt one after another, each time beginning with another one.

    So what else the machine does falls on all of them. Returns their samples, all in the same order.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    names = list(contenders)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=repeats * len(prompts) * len(contenders))
        turn = 0
        for repeat in range(repeats):
            for prompt, token_ids in prompts.items():
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    progress.update(task, description=f"{title}: {name}")
                    samples[name].append(await contenders[name].decode(prompt, repeat, token_ids, max_tokens))
                    progress.advance(task)
                turn += 1
    return samples


def have_same_tokens(samples: Samples) -> bool:
    """Return whether all contenders said the same."""
    texts = [[sample.token_ids for sample in own] for own in samples.values()]
    return all(text == texts[0] for text in texts)


def median_ratio(own: Sequence[Sample], baseline: Sequence[Sample]) -> float:
    """Return the median of the ratios of tokens per second, sample by sample; 0 without any that has a speed."""
    ratios = [a.tokens_per_second / b.tokens_per_second for a, b in _pairs(own, baseline)]
    return median(ratios) if ratios else 0.0


def ratio_of_totals(own: Sequence[Sample], baseline: Sequence[Sample]) -> float:
    """Return the ratio of the tokens per second of all samples together; 0 without any that has a speed."""
    pairs = _pairs(own, baseline)
    return sum(b.decode_seconds for _, b in pairs) / sum(a.decode_seconds for a, _ in pairs) if pairs else 0.0


def _pairs(own: Sequence[Sample], baseline: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    # Sampled texts can end with their first token, which has no speed.
    pairs = zip(own, baseline, strict=True)
    return [(a, b) for a, b in pairs if a.tokens_per_second and b.tokens_per_second]


def records(samples: Samples) -> dict[str, list[dict[str, object]]]:
    """Return all samples for a report."""
    return {name: [sample.as_record() for sample in own] for name, own in samples.items()}


def environment(prompts: Mapping[str, list[int]], *, repeats: int, max_tokens: int) -> dict[str, object]:
    """Describe for a report where and with what it was measured."""
    return {
        "specd": __version__,
        "mlx": version("mlx"),
        "grpcio": version("grpcio"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "prompts": list(prompts),
        "repeats": repeats,
        "max_tokens": max_tokens,
    }


def console() -> Console:
    """Return where tables go: without a terminal, wide enough for them."""
    return Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=WIDTH)

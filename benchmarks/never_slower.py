"""Pairs for which speculation does not pay: the service, which chooses k, beside its target alone.

    python benchmarks/never_slower.py [--pairs random same slow hot] [--num-prompts 12] [-n 128] [--json FILE]

- random: a draft of random weights, whose tokens are never accepted.
- same: the draft is the target, which is always right and costs what it saves.
- slow: the embedded draft, each of whose steps takes 20 ms longer.
- hot: the embedded pair at a temperature of 2, where little is accepted.

Each pair runs in processes of its own, which know nothing of it at first: neither what steps cost (that is kept in an
empty directory) nor what is accepted. Its sessions run one after another, and learn from those before them. The first
is therefore shown by itself, and the ratios are those of the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from rich.table import Table

from specd.bench.contenders import Contender, Specd
from specd.bench.environment import console, environment, new_table
from specd.bench.prompts import encode, load_prompts, short, spread
from specd.bench.sample import Sample, have_same_tokens, median_ratio
from specd.bench.setup import SPECD, Setup
from specd.bench.turns import take_turns
from specd.client import NO_RETRIES, AsyncClient
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import NO_PREFIX_CACHE, Stack

TOKENIZER = Path(EMBEDDED_TARGET) / "tokenizer.json"
ADAPTIVE, TARGET_ONLY = "adaptive", "target alone"
MOST_LOST = 0.03
SLOW_MILLISECONDS = 20


@dataclass(frozen=True)
class Pair:
    """A draft for the embedded target, and how it is used."""

    draft: str = EMBEDDED_DRAFT
    temperature: float = 0.0
    slow_milliseconds: float = 0.0


@dataclass(frozen=True)
class PairResult:
    """A pair with adaptive k compared with its target alone: ratios of tokens per second, after the first session.

    `ratios` are those of all sessions, the first one's first; 0 for one that ended with its first token.
    """

    target_only_tokens_per_second: float
    adaptive_tokens_per_second: float
    ratio: float
    ratio_of_totals: float
    first_session_ratio: float
    first_token_ratio: float
    proposed_per_round: float
    first_session_proposed_per_round: float
    accepted_per_round: float
    same_tokens: bool
    ratios: Sequence[float]

    @property
    def is_slower(self) -> bool:
        """Whether adaptive k loses more than the tolerance."""
        return self.ratio < 1 - MOST_LOST


def pairs(directory: Path) -> dict[str, Pair]:
    """Return all pairs; what is made for one is in the directory."""
    return {
        "random": Pair(draft=str(directory / "random-draft")),
        "same": Pair(draft=EMBEDDED_TARGET),
        "slow": Pair(slow_milliseconds=SLOW_MILLISECONDS),
        "hot": Pair(temperature=2.0),
    }


def save_random_draft(directory: Path) -> None:
    """Save the embedded draft with random bits for all that is quantised: the same shapes and ranges, and steps."""
    directory.mkdir()
    random = np.random.default_rng(0)
    trained: dict[str, mx.array] = mx.load(str(Path(EMBEDDED_DRAFT) / "model.safetensors"))  # type: ignore[assignment]
    weights = {
        name: mx.array(random.integers(2**32, size=weight.shape, dtype=np.uint32))
        if weight.dtype == mx.uint32
        else weight
        for name, weight in trained.items()
    }
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    for path in Path(EMBEDDED_DRAFT).glob("*.json"):
        shutil.copyfile(path, directory / path.name)


async def measure(
    name: str, pair: Pair, prompts: Mapping[str, list[int]], options: argparse.Namespace
) -> dict[str, list[Sample]]:
    """Return the samples of both contenders on a pair, the target alone first."""
    with tempfile.TemporaryDirectory(prefix="specd-bench-") as cache:
        # The costs of a slowed draft are not to be kept as those of the same draft otherwise.
        stack = Stack(
            target=EMBEDDED_TARGET, draft=pair.draft, environment={**NO_PREFIX_CACHE, "XDG_CACHE_HOME": cache}
        )
        if pair.slow_milliseconds:
            assert stack.draft is not None
            script = Path(__file__).with_name("slow_draft_worker.py")
            stack.draft.command[1:3] = [str(script), str(pair.slow_milliseconds)]  # instead of `-m specd`
        async with stack, AsyncClient(stack.address, retries=NO_RETRIES) as client:
            contenders: dict[str, Contender] = {
                TARGET_ONLY: Specd(client, Setup(SPECD, 0, pair.temperature)),
                ADAPTIVE: Specd(client, Setup(SPECD, None, pair.temperature)),
            }
            # Only the target: what the service learns of the draft begins with the first session.
            await contenders[TARGET_ONLY].decode("", 0, next(iter(prompts.values())), 16)
            return await take_turns(
                contenders, prompts, repeats=options.repeats, max_tokens=options.max_tokens, title=name
            )


def summarise(samples: Mapping[str, Sequence[Sample]]) -> PairResult:
    """Take medians and ratios."""
    target_only, adaptive = samples[TARGET_ONLY], samples[ADAPTIVE]
    later = slice(1, None)
    return PairResult(
        target_only_tokens_per_second=_speed(target_only[later]),
        adaptive_tokens_per_second=_speed(adaptive[later]),
        ratio=median_ratio(adaptive[later], target_only[later]),
        ratio_of_totals=_ratio_of_totals(adaptive[later], target_only[later]),
        first_session_ratio=median_ratio(adaptive[:1], target_only[:1]),
        first_token_ratio=median(
            own.time_to_first_token_seconds / other.time_to_first_token_seconds
            for own, other in zip(adaptive[later], target_only[later], strict=True)
        ),
        proposed_per_round=_per_round([sample.proposed_tokens for sample in adaptive[later]], adaptive[later]),
        first_session_proposed_per_round=_per_round([adaptive[0].proposed_tokens], adaptive[:1]),
        accepted_per_round=_per_round([sample.accepted_tokens for sample in adaptive[later]], adaptive[later]),
        same_tokens=have_same_tokens(samples.values()),
        ratios=[median_ratio([a], [b]) for a, b in zip(adaptive, target_only, strict=True)],
    )


def _ratio_of_totals(samples: Sequence[Sample], baseline: Sequence[Sample]) -> float:
    """Return the ratio of the tokens per second of all samples together; 0 if no two have a speed."""
    pairs = [(a, b) for a, b in zip(samples, baseline, strict=True) if a.tokens_per_second and b.tokens_per_second]
    return sum(b.decode_seconds for _, b in pairs) / sum(a.decode_seconds for a, _ in pairs) if pairs else 0.0


def _speed(samples: Sequence[Sample]) -> float:
    return median(sample.tokens_per_second for sample in samples)


def _per_round(counts: Sequence[int], samples: Sequence[Sample]) -> float:
    return sum(counts) / max(sum(len(sample.rounds) for sample in samples), 1)


def table(results: Mapping[str, PairResult]) -> Table:
    """Lay the results out."""
    headers = (
        "target alone\ntokens/s",
        "adaptive\ntokens/s",
        "ratio",
        "of\ntotals",
        "first\nsession",
        "time to\n1st token",
        "proposed\n/round",
        "first\nsession",
        "accepted\n/round",
        "tokens",
    )
    table = new_table("pair", headers)
    for name, result in results.items():
        table.add_row(
            name,
            f"{result.target_only_tokens_per_second:.1f}",
            f"{result.adaptive_tokens_per_second:.1f}",
            f"[{'red' if result.is_slower else 'green'}]{result.ratio:.3f}[/]",
            f"{result.ratio_of_totals:.3f}",
            f"{result.first_session_ratio:.3f}",
            f"{result.first_token_ratio:.3f}",
            f"{result.proposed_per_round:.2f}",
            f"{result.first_session_proposed_per_round:.2f}",
            f"{result.accepted_per_round:.2f}",
            "same" if result.same_tokens else "[bold red]DIFFERENT[/]",
        )
    return table


def main() -> None:
    """Measure the pairs, print a table, write JSON; fail if the tokens differ."""
    names = list(pairs(Path()))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", choices=names, default=names, metavar="PAIR")
    parser.add_argument("--num-prompts", type=int, default=12, help="sessions of each contender, at least 2")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("-n", "--max-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write the results and every sample to this file")
    options = parser.parse_args()
    if options.num_prompts * options.repeats < 2:
        parser.error("the first session is left out of the ratios: there must be at least 2")
    os.environ.setdefault("SPECD_LOG_LEVEL", "warning")

    prompts = spread(short(encode(load_prompts(), TOKENIZER.read_bytes())), options.num_prompts)
    measured: dict[str, dict[str, list[Sample]]] = {}
    with tempfile.TemporaryDirectory(prefix="specd-bench-") as directory:
        save_random_draft(Path(directory) / "random-draft")
        for name, pair in pairs(Path(directory)).items():
            if name in options.pairs:
                measured[name] = asyncio.run(measure(name, pair, prompts, options))
    results = {name: summarise(samples) for name, samples in measured.items()}

    output = console()
    output.print(table(results))
    slower = [name for name, result in results.items() if result.is_slower]
    verdict = f"[bold red]slower by more: {', '.join(slower)}[/]" if slower else "all"
    output.print(f"within {MOST_LOST:.0%} of the target alone, after the first session: {verdict}", highlight=False)
    if options.json is not None:
        report: dict[str, Any] = {
            "environment": environment(prompts=list(prompts), repeats=options.repeats, max_tokens=options.max_tokens),
            "pairs": {
                name: {
                    **asdict(result),
                    "samples": {who: [sample.as_record() for sample in own] for who, own in measured[name].items()},
                }
                for name, result in results.items()
            },
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(not all(result.same_tokens for result in results.values()))


if __name__ == "__main__":
    main()

"""A head of the target beside a draft worker, look-up and the target alone, on seven kinds of work.

    python benchmarks/heads.py [HEAD] [-n 96] [--num-prompts 12] [--turns 1] [--json FILE]

One service has the head in its target worker, the other one has a draft worker. Both also have look-up. They take turns
prompt by prompt. The work is that of look-up (`repeating_work.py`), code, and prompts that nothing was trained or tuned
on, greedy and at temperature 1. The included head, which `train_head.py` made, was trained on none of it.

A table for each kind: medians of the speed, alone and over the target alone; tokens a round; the acceptance at the
first, second and third draft token, if the one before was accepted; the time of a proposal; and that of a round outside
of both models, which is the wire and the coordinator.
The planner chooses k where none is named. At the end, a planner that has look-up and a draft is compared with the best
source alone, which is the fastest over all prompts: the median of the ratios for each prompt. Exit code 1 if it does
not reach 0.97, or if tokens differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import harmonic_mean, median
from typing import Any

from repeating_work import KINDS

from specd.bench.environment import console, environment, new_table
from specd.bench.prompts import load_prompts
from specd.bench.turns import rotated
from specd.client import NO_RETRIES, AsyncClient
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_HEAD, EMBEDDED_TARGET
from specd.supervisor import NO_PREFIX_CACHE, Stack

ALONE, LOOKUP, HEAD, DRAFT = "target alone", "look-up", "head", "draft worker"
_K = 3
_LEAST = 0.97  # of the best source alone

# The service of each contender, and the fields of its requests.
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    ALONE: (HEAD, {"draft_source": "none"}),
    LOOKUP: (HEAD, {"draft_source": "lookup"}),
    **{
        f"{name}{suffix}": (name, fields)
        for name in (HEAD, DRAFT)
        for suffix, fields in (
            (f", k = {_K}", {"num_draft_tokens": _K}),
            ("", {"draft_source": "model"}),
            (" and look-up", {}),
        )
    },
}


@dataclass
class Measured:
    """The answers of a contender to the prompts of a kind."""

    token_ids: list[list[int]] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    draft_seconds: list[float] = field(default_factory=list)  # of each round with a proposal
    other_seconds: list[float] = field(default_factory=list)  # of each round, outside of both models
    num_rounds: int = 0
    tried: list[int] = field(default_factory=lambda: [0] * _K)
    accepted: list[int] = field(default_factory=lambda: [0] * _K)

    async def ask(self, client: AsyncClient, prompt: str, max_tokens: int, fields: Mapping[str, Any]) -> None:
        """Add the answer to a prompt."""
        token_ids: list[int] = []
        async for message in client.generate(prompt, max_tokens=max_tokens, **fields).messages():
            if token_ids:
                self.other_seconds.append(message.round.wire_seconds + message.round.coordinator_seconds)
            if token_ids and message.round.proposed:
                self.draft_seconds.append(message.round.draft_seconds)
            token_ids.extend(token.id for token in message.tokens)
            statistics = message.statistics
        self.token_ids.append(token_ids)
        self.speeds.append((len(token_ids) - 1) / max(statistics.decode_seconds, 1e-6))
        self.num_rounds += statistics.rounds
        tried = statistics.rounds
        for i, (proposed, accepted) in enumerate(
            zip(statistics.proposed_by_position[:_K], statistics.accepted_by_position[:_K], strict=False)
        ):
            self.tried[i] += min(tried, proposed)
            self.accepted[i] += accepted
            tried = accepted

    def as_record(self, alone: Measured) -> dict[str, Any]:
        """Return the figures, with the speed over the target alone."""
        return {
            "speeds": self.speeds,
            "tokens_per_second": median(self.speeds),
            "to_target_alone": median(a / b for a, b in zip(self.speeds, alone.speeds, strict=True)),
            "tokens_per_round": sum(map(len, self.token_ids)) / self.num_rounds,
            "accepted_of_tried": [a / t if t else None for a, t in zip(self.accepted, self.tried, strict=True)],
            "draft_ms": 1e3 * median(self.draft_seconds) if self.draft_seconds else None,
            "other_ms": 1e3 * median(self.other_seconds),
            "same_tokens": self.token_ids == alone.token_ids,
        }


async def measure(options: argparse.Namespace) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the figures by kind of work and contender."""
    code, unseen = ([*load_prompts(Path(__file__).parent / name).values()] for name in ("prompts", "unseen/held_out"))
    work: dict[str, tuple[list[str], dict[str, Any]]] = {kind: (texts(), {}) for kind, texts in KINDS.items()}
    work |= {"code": (code, {}), "unseen": (unseen, {}), "unseen, T = 1": (unseen, {"temperature": 1.0, "seed": 1})}
    results: dict[str, dict[str, dict[str, Any]]] = {}
    async with AsyncExitStack() as running:
        clients = {}
        for name, draft, own in ((HEAD, "", options.head), (DRAFT, options.draft, "none")):
            stack = Stack(
                target=options.target,
                draft=draft,
                options={"target-worker": {"self_draft": own}},
                environment=NO_PREFIX_CACHE,
            )
            await running.enter_async_context(stack)
            clients[name] = await running.enter_async_context(AsyncClient(stack.address, retries=NO_RETRIES))
        for kind, (prompts, of_kind) in work.items():
            if options.kinds and kind not in options.kinds:
                continue
            measured = {name: Measured() for name in CONTENDERS}
            for turn, prompt in enumerate(prompts[: options.num_prompts] * options.turns):
                for name in rotated(CONTENDERS, turn):
                    service, fields = CONTENDERS[name]
                    await measured[name].ask(clients[service], prompt, options.max_tokens, {**fields, **of_kind})
            results[kind] = {name: own.as_record(measured[ALONE]) for name, own in measured.items()}
            show(kind, results[kind])
    return results


def show(kind: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the table of a kind."""
    table = new_table(
        kind,
        ("tokens\n/s", "/ target\nalone", "tokens\na round", "accepted\nof tried", "draft\nms", "other\nms", "tokens"),
    )
    for name, row in rows.items():
        shares = " ".join("-" if share is None else f"{share:.2f}" for share in row["accepted_of_tried"])
        table.add_row(
            name,
            f"{row['tokens_per_second']:.1f}",
            f"{row['to_target_alone']:.2f}",
            f"{row['tokens_per_round']:.2f}",
            shares,
            "-" if row["draft_ms"] is None else f"{row['draft_ms']:.2f}",
            f"{row['other_ms']:.2f}",
            "same" if row["same_tokens"] else "DIFFERENT",
        )
    console().print(table)


def of_best(rows: Mapping[str, Mapping[str, Any]], name: str) -> float:
    """Return the speed of a draft with look-up, over the best of the draft, look-up and the target alone."""
    speeds = {each: row["speeds"] for each, row in rows.items()}
    best = max((ALONE, LOOKUP, name), key=lambda each: harmonic_mean(speeds[each]))  # of texts of the same lengths
    return median(a / b for a, b in zip(speeds[f"{name} and look-up"], speeds[best], strict=True))


def main() -> int:
    """Measure, print the tables, write JSON, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", nargs="?", default=EMBEDDED_HEAD, help="a directory or a repository with a head")
    parser.add_argument("--target", default=EMBEDDED_TARGET)
    parser.add_argument("--draft", default=EMBEDDED_DRAFT)
    parser.add_argument("-n", "--max-tokens", type=int, default=96)
    parser.add_argument("--num-prompts", type=int, default=12, help="of each kind")
    parser.add_argument("--turns", type=int, default=1, help="requests for each prompt by each contender")
    parser.add_argument("--kinds", nargs="*", help="only these kinds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("SPECD_LOG_LEVEL", "warning")
    results = asyncio.run(measure(options))
    fails = False
    for kind, rows in results.items():
        ratios = {name: of_best(rows, name) for name in (HEAD, DRAFT)}
        for name, ratio in ratios.items():
            console().print(f"{kind}: {name} and look-up has {ratio:.2f} of the best alone", highlight=False)
        fails |= min(ratios.values()) < _LEAST or not all(row["same_tokens"] for row in rows.values())
    if options.json:
        facts = {"max_tokens": options.max_tokens, "num_prompts": options.num_prompts, "turns": options.turns}
        options.json.write_text(json.dumps({"environment": environment(**facts), **results}, indent=1) + "\n")
    return int(fails)


if __name__ == "__main__":
    sys.exit(main())

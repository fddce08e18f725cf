"""Time to first token over the turns of a session, with the workers' prefix cache and without.

    python benchmarks/multi_turn.py [--target DIR] [--draft DIR] [--turns 10] [--repeats 3] [--json FILE]

Each turn adds the same number of new tokens to a session, which is continued by its id. With the cache only these are
computed; without it, everything is, and the time grows with the session.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path
from statistics import median

from specd.bench.prompts import load_prompts
from specd.client import NO_RETRIES, AsyncClient
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import NO_PREFIX_CACHE, Stack

NEW_CHARACTERS = 320  # about a hundred tokens of code
MAX_TOKENS = 32


async def measure(
    target: str, draft: str, environment: dict[str, str], turns: list[str], repeats: int
) -> list[list[dict[str, float]]]:
    """Return what each turn took, for each repeat."""
    async with (
        Stack(target=target, draft=draft, environment=environment) as stack,
        AsyncClient(stack.address, retries=NO_RETRIES) as client,
    ):
        await run_session(client, turns[:1])  # warms up
        # Each begins with another line, so that none finds what the one before has left.
        return [await run_session(client, [f"# {i}\n{turns[0]}", *turns[1:]]) for i in range(repeats)]


async def run_session(client: AsyncClient, turns: list[str]) -> list[dict[str, float]]:
    """Run one session of as many turns as there are texts."""
    results: list[dict[str, float]] = []
    session = client.session()
    for text in turns:
        statistics = (await session.generate(text, max_tokens=MAX_TOKENS).completion()).statistics
        results.append(
            {
                "prompt_tokens": statistics.prompt_tokens,
                "target_reused_tokens": statistics.target_reused_tokens,
                "draft_reused_tokens": statistics.draft_reused_tokens,
                "time_to_first_token_seconds": statistics.time_to_first_token_seconds,
            }
        )
    return results


def medians(sessions: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """Take the median over the repeats, turn by turn."""
    return [{name: median(turn[name] for turn in turns) for name in turns[0]} for turns in zip(*sessions, strict=True)]


def main() -> None:
    """Measure both, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=EMBEDDED_TARGET)
    parser.add_argument("--draft", default=EMBEDDED_DRAFT)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("SPECD_LOG_LEVEL", "warning")
    text = "\n".join(load_prompts().values())
    turns = [text[i * NEW_CHARACTERS : (i + 1) * NEW_CHARACTERS] for i in range(options.turns)]
    with_cache, without = (
        medians(asyncio.run(measure(options.target, options.draft, environment, turns, options.repeats)))
        for environment in ({}, NO_PREFIX_CACHE)
    )
    print("turn  prompt tokens  reused by target, draft  first token  without the cache")
    for number, (own, other) in enumerate(zip(with_cache, without, strict=True), start=1):
        reused = f"{own['target_reused_tokens']:15.0f}, {own['draft_reused_tokens']:5.0f}"
        times = [f"{1000 * turn['time_to_first_token_seconds']:.0f} ms" for turn in (own, other)]
        print(f"{number:4}  {own['prompt_tokens']:13.0f}  {reused}  {times[0]:>11}  {times[1]:>17}")
    for name, turn in (("with the cache", with_cache), ("without", without)):
        first, last = (turn[i]["time_to_first_token_seconds"] for i in (1, -1))
        print(f"time to first token, turn {options.turns} / turn 2, {name}: {last / first:.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps({"with_cache": with_cache, "without_cache": without}, indent=1) + "\n")


if __name__ == "__main__":
    main()

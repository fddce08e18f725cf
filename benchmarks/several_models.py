"""Measure what several models cost a request for one that is loaded.

    python benchmarks/several_models.py [--turns 10] [--requests 40]

Two stacks with the included pair run at the same time: one serves the pair alone, the other has it as one of three
models. They get the same requests in turns. The script prints the medians of the times of whole requests, and the
median of their ratios by turn, with its range.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from statistics import median

from specd import AsyncClient
from specd.bench.prompts import load_prompts
from specd.model_processes import ModelPlan, ModelPlans
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_T5_TARGET, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.worker_group import WorkerModels

_MAX_TOKENS = 64
_PLANS = ModelPlans(
    (
        ModelPlan(WorkerModels(EMBEDDED_TARGET, EMBEDDED_DRAFT, name="coder")),
        ModelPlan(WorkerModels(EMBEDDED_DRAFT, name="small")),
        ModelPlan(WorkerModels(EMBEDDED_T5_TARGET, name="t5")),
    )
)


async def measure(client: AsyncClient, model: str, prompts: list[str]) -> float:
    """Return the median of the seconds of a request."""
    seconds = []
    for prompt in prompts:
        began_at = time.perf_counter()
        await client.generate(prompt, model=model, max_tokens=_MAX_TOKENS, num_draft_tokens=3).completion()
        seconds.append(time.perf_counter() - began_at)
    return median(seconds)


async def main(turns: int, requests: int) -> None:
    """Start both stacks, and measure them in turns."""
    prompts = [*load_prompts().values()][:requests]
    async with (
        Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT) as alone,
        Stack(models=_PLANS) as several,
        AsyncClient(alone.address) as one,
        AsyncClient(several.address) as other,
    ):
        for client, model in ((one, ""), (other, "coder")):
            await measure(client, model, prompts)
        ratios: list[float] = []
        ones: list[float] = []
        others: list[float] = []
        for turn in range(turns):
            sides = [(one, "", ones), (other, "coder", others)]
            for client, model, times in sides if turn % 2 else sides[::-1]:
                times.append(await measure(client, model, prompts))
            ratios.append(ones[-1] / others[-1])
            print(f"turn {turn + 1}: {1e3 * ones[-1]:.1f} and {1e3 * others[-1]:.1f} ms", flush=True)
    print(f"alone {1e3 * median(ones):.1f} ms, as one of three models {1e3 * median(others):.1f} ms")
    low, high = min(ratios), max(ratios)
    print(f"speed as one of three models, relative to alone: {median(ratios):.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--requests", type=int, default=40)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.turns, arguments.requests))

"""T5 pairs: specd beside transformers, on the same sources and weights, with one thread each.

    python benchmarks/t5_contenders.py --target DIR --draft DIR [-k 1 -k 3] [-n 128] [--threads 1] [--json FILE]

Needs PyTorch (the extra `convert`) and a pair as Hugging Face has it. transformers decodes plainly and with the draft
as its assistant (its own number of assistant tokens, then those of -k); specd with the target alone, each k, and an
adaptive one. They take turns source by source, without prefix caches. Speeds are medians of tokens over seconds, the
encoder and the first token included. *same texts* compares with transformers' plain generation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM

from specd.bench.environment import console, environment, new_table
from specd.bench.prompts import encode, load_prompts
from specd.bench.turns import rotated
from specd.client import NO_RETRIES, AsyncClient
from specd.supervisor import NO_PREFIX_CACHE, Stack

Decode = Callable[[list[int]], Awaitable[list[int]]]


def transformers_contenders(options: argparse.Namespace) -> dict[str, Decode]:
    """Return transformers' ways to decode."""
    torch.set_num_threads(options.threads)
    target, draft = (
        AutoModelForSeq2SeqLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (options.target, options.draft)
    )

    def assisted_by(num_assistant_tokens: int | None) -> Decode:
        async def decode(source: list[int]) -> list[int]:
            if num_assistant_tokens is not None:
                draft.generation_config.num_assistant_tokens = num_assistant_tokens
                draft.generation_config.num_assistant_tokens_schedule = "constant"
            with torch.no_grad():
                generated = target.generate(
                    torch.tensor([source]), max_new_tokens=options.max_tokens, do_sample=False, assistant_model=draft
                )
            return [int(token) for token in generated[0, 1:]]

        return decode

    async def plain(source: list[int]) -> list[int]:
        with torch.no_grad():
            generated = target.generate(torch.tensor([source]), max_new_tokens=options.max_tokens, do_sample=False)
        return [int(token) for token in generated[0, 1:]]

    assisted = {f"transformers, assisted, k = {k}": assisted_by(k) for k in options.k}
    return {"transformers, plain": plain, "transformers, assisted": assisted_by(None), **assisted}


def specd_contenders(client: AsyncClient, options: argparse.Namespace) -> dict[str, Decode]:
    """Return specd's ways to decode."""

    def with_k(k: int | None) -> Decode:
        async def decode(source: list[int]) -> list[int]:
            answer = client.generate(source, max_tokens=options.max_tokens, num_draft_tokens=k)
            return (await answer.completion()).token_ids

        return decode

    fixed = {f"specd, k = {k}": with_k(k) for k in options.k}
    return {"specd, target alone": with_k(0), **fixed, "specd, adaptive": with_k(None)}


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each contender."""
    variables = {f"SPECD_{worker}_WORKER_BLAS_THREADS": str(options.threads) for worker in ("DRAFT", "TARGET")}
    tokenizer = await asyncio.to_thread(Path(options.target, "tokenizer.json").read_bytes)
    sources = list(encode(load_prompts(options.sources, for_encoder=True), tokenizer).values())
    async with (
        Stack(target=options.target, draft=options.draft, environment=NO_PREFIX_CACHE | variables) as stack,
        AsyncClient(stack.address, retries=NO_RETRIES) as client,
    ):
        contenders = transformers_contenders(options) | specd_contenders(client, options)
        texts: dict[str, list[list[int]]] = {name: [] for name in contenders}
        speeds: dict[str, list[float]] = {name: [] for name in contenders}
        for decode in contenders.values():
            await decode(sources[0])
        for turn, source in enumerate(sources):
            for name in rotated(contenders, turn):
                began_at = time.perf_counter()
                tokens = await contenders[name](source)
                speeds[name].append(len(tokens) / (time.perf_counter() - began_at))
                texts[name].append(tokens)
    reference = texts["transformers, plain"]
    best_of_others = max(median(own) for name, own in speeds.items() if name.startswith("transformers"))
    return [
        {
            "contender": name,
            "tokens_per_second": median(own),
            "to_best_of_transformers": median(own) / best_of_others,
            "same_texts": sum(a == b for a, b in zip(texts[name], reference, strict=True)),
            "texts": len(sources),
        }
        for name, own in speeds.items()
    ]


def main() -> None:
    """Measure, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="directory of the target, as Hugging Face has it")
    parser.add_argument("--draft", required=True, help="directory of the draft")
    parser.add_argument("--sources", type=Path, help="directory with a source per file (default: specd's own)")
    parser.add_argument("-k", type=int, action="append", help="draft tokens per round (default: 1 2 3 5)")
    parser.add_argument("-n", "--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch, and of each worker's OpenBLAS")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.k = options.k or [1, 2, 3, 5]
    rows = asyncio.run(measure(options))
    table = new_table("medians", ("tokens\n/s", "/ best of\ntransformers", "same\ntexts"))
    for row in rows:
        speed, ratio = row["tokens_per_second"], row["to_best_of_transformers"]
        table.add_row(row["contender"], f"{speed:.1f}", f"{ratio:.2f}", f"{row['same_texts']} of {row['texts']}")
    console().print(table)
    if options.json:
        facts = {"target": Path(options.target).name, "draft": Path(options.draft).name, "threads": options.threads}
        options.json.write_text(json.dumps({"environment": environment(**facts), "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

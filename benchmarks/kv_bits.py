"""Caches in 8 and 4 bits beside plain ones: bytes a token, speed, and acceptance.

    python benchmarks/kv_bits.py [--target DIR] [--draft DIR] [--num-prompts 8] [-n 128] [-k 4] [--json FILE]

Three stacks, whose workers keep their caches in 16 (that is, as the model computes), 8 and 4 bits, take turns on the
same prompts. *same tokens* is how many tokens of a text are those with plain caches, up to the first other one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from specd.bench.contenders import Specd
from specd.bench.environment import console, environment, new_table
from specd.bench.prompts import encode, load_prompts, spread
from specd.bench.sample import Sample, summarise
from specd.bench.setup import SPECD, Setup
from specd.client import NO_RETRIES, AsyncClient
from specd.rpc.channel import open_channel
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import NO_PREFIX_CACHE, Stack
from specd.v1 import model_pb2, model_pb2_grpc
from specd.worker.session.prefix_cache import common_prefix_len

BITS = (16, 8, 4)


async def bytes_per_token(address: str) -> int:
    """Return what a worker's caches take for each token."""
    async with open_channel(address) as channel:
        described = await model_pb2_grpc.ModelServiceStub(channel).Describe(model_pb2.DescribeRequest())
    return sum(part.bytes_per_token for part in described.cache_parts)


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each number of bits."""
    tokenizer = await asyncio.to_thread(Path(options.target, "tokenizer.json").read_bytes)
    prompts = encode(spread(load_prompts(), options.num_prompts), tokenizer)
    samples: dict[tuple[int, int], list[Sample]] = {(bits, k): [] for bits in BITS for k in (0, options.k)}
    async with AsyncExitStack() as running:
        clients, sizes = {}, {}
        for bits in BITS:
            own = {f"SPECD_{worker}_WORKER_KV_BITS": str(bits) for worker in ("TARGET", "DRAFT")}
            stack = await running.enter_async_context(
                Stack(target=options.target, draft=options.draft, environment=NO_PREFIX_CACHE | own)
            )
            clients[bits] = await running.enter_async_context(AsyncClient(stack.address, retries=NO_RETRIES))
            sizes[bits] = await bytes_per_token(stack.target.facts["address"])
        warm_up = next(iter(prompts.values()))
        for bits, k in samples:
            await Specd(clients[bits], Setup(SPECD, k)).decode("", 0, warm_up, 8)
        for name, ids in prompts.items():
            for (bits, k), own_samples in samples.items():
                own_samples.append(await Specd(clients[bits], Setup(SPECD, k)).decode(name, 0, ids, options.max_tokens))
    rows = []
    for bits in BITS:
        alone, drafted = (summarise(Setup(SPECD, k), samples[bits, k], samples[16, 0]) for k in (0, options.k))
        pairs = zip(samples[bits, 0], samples[16, 0], strict=True)
        lengths = [common_prefix_len(own.token_ids, plain.token_ids) for own, plain in pairs]
        rows.append(
            {
                "bits": bits,
                "bytes a token": sizes[bits],
                "target alone, tokens/s": alone.tokens_per_second,
                f"k = {options.k}, tokens/s": drafted.tokens_per_second,
                "accepted per try": drafted.acceptance_per_try,
                "same tokens": sum(lengths) / len(lengths),
            }
        )
    return rows


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=EMBEDDED_TARGET)
    parser.add_argument("--draft", default=EMBEDDED_DRAFT)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("-n", "--max-tokens", type=int, default=128)
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("SPECD_LOG_LEVEL", "warning")
    rows = asyncio.run(measure(options))
    table = new_table("bits", [*rows[0]][1:])
    for row in rows:
        bits, size, *others = row.values()
        table.add_row(str(bits), str(size), *(f"{value:.2f}" for value in others))
    console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps({"environment": environment(), "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

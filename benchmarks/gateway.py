"""The time of the HTTP gateway over gRPC: `python benchmarks/gateway.py [--streams 8] [--turns 12] [--singles 60]`.

One stack, the same prompts over gRPC and over HTTP in turns. The time to the first token is that of one stream at a
time on a short prompt: among several it is the time of the others' prompts. The time per token after it is that of so
many streams at once. It prints medians, and what the gateway adds: the median of the differences of pairs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from specd.client import NO_RETRIES, AsyncClient
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import NO_PREFIX_CACHE, Stack

PROMPTS = [path.read_text() for path in sorted((Path(__file__).parent / "prompts").glob("*.txt"))[:16]]
SHORT_PROMPT, FEW_TOKENS = "def area(r):", 8
MAX_TOKENS = 96
NUM_DRAFT_TOKENS = 4

Times = tuple[float, float]  # to the first token, and per token after it; seconds
Ask = Callable[[str, int], Awaitable[Times]]


async def over_grpc(client: AsyncClient, prompt: str, max_tokens: int) -> Times:
    began_at, first_at, num_tokens, num_first = time.perf_counter(), 0.0, 0, 0
    stream = client.generate(prompt, max_tokens=max_tokens, num_draft_tokens=NUM_DRAFT_TOKENS, ignore_eos=True)
    async for response in stream.messages():
        if not first_at:
            first_at, num_first = time.perf_counter(), len(response.tokens)
        num_tokens += len(response.tokens)
    return first_at - began_at, (time.perf_counter() - first_at) / (num_tokens - num_first)


class HttpClient:
    """Reads events from plain connections, which stay open: what a client library takes is not the gateway's."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, prompt: str, max_tokens: int) -> Times:
        """Ask once."""
        fields = {"prompt": prompt, "max_tokens": max_tokens, "num_draft_tokens": NUM_DRAFT_TOKENS, "ignore_eos": True}
        body = json.dumps({**fields, "temperature": 0, "stream": True, "token_sources": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._address}\r\ncontent-length: {len(body)}\r\n\r\n"
        host, port = self._address.rsplit(":", 1)
        reader, writer = self._free.pop() if self._free else await asyncio.open_connection(host, int(port))
        began_at, first_at = time.perf_counter(), 0.0
        writer.write(head.encode() + body)
        events: list[bytes] = []  # read later: that is the client's work too
        while (line := await reader.readline()) != b"data: [DONE]\n":
            if line.startswith(b"data: {"):
                first_at = first_at or time.perf_counter()
                events.append(line)
        ended_at = time.perf_counter()
        await reader.readuntil(b"\r\n0\r\n\r\n")  # the last chunk
        self._free.append((reader, writer))
        counts = [len(json.loads(event[6:])["choices"][0]["tokens"]) for event in events]
        assert sum(counts) == max_tokens
        return first_at - began_at, (ended_at - first_at) / (max_tokens - counts[0])


async def measure(streams: int, turns: int, singles: int) -> None:
    async with (
        Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, http="127.0.0.1:0", environment=NO_PREFIX_CACHE) as stack,
        AsyncClient(stack.address, retries=NO_RETRIES) as client,
    ):
        assert stack.gateway is not None
        sides: dict[str, Ask] = {
            "gRPC": partial(over_grpc, client),
            "gateway": HttpClient(stack.gateway.facts["address"]).ask,
        }
        firsts: dict[str, list[float]] = {name: [] for name in sides}
        eaches: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(-2, singles):  # the first ones warm up
            for name in sides if turn % 2 else reversed(sides):
                first, _ = await sides[name](SHORT_PROMPT, FEW_TOKENS)
                firsts[name] += [1e3 * first] if turn >= 0 else []
        for turn in range(-1, turns):
            prompts = [PROMPTS[(turn + i) % len(PROMPTS)] for i in range(streams)]
            for name in sides if turn % 2 else reversed(sides):
                times = await asyncio.gather(*(sides[name](prompt, MAX_TOKENS) for prompt in prompts))
                eaches[name] += [1e3 * each for _, each in times] if turn >= 0 else []
    print(f"medians, ms: first token of 1 stream, {singles} times; per token of {streams} streams, {turns} times")
    print(f"{'':10}{'first token':>14}{'per token':>12}")
    for name in sides:
        print(f"{name:10}{statistics.median(firsts[name]):14.2f}{statistics.median(eaches[name]):12.2f}")
    first = statistics.median(b - a for a, b in zip(firsts["gRPC"], firsts["gateway"], strict=True))
    each = statistics.median(b / a - 1 for a, b in zip(eaches["gRPC"], eaches["gateway"], strict=True))
    print(f"{'added':10}{first:14.2f}{100 * each:11.1f}%")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--singles", type=int, default=60)
    arguments = parser.parse_args()
    os.environ.setdefault("SPECD_LOG_LEVEL", "error")
    asyncio.run(measure(arguments.streams, arguments.turns, arguments.singles))

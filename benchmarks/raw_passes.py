"""Passes and loops of mlx-lm in this process, without specd: what `accelerator.py` compares specd with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm import stream_generate
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from mlx_lm.utils import dequantize_model

from specd.worker.model.directory import find
from specd.worker.model.loader import read

WIDTHS = (1, 2, 4, 8, 16)
_CACHED_TOKENS = 200


class PlainModel:
    """A model as mlx-lm loads it, except that on a CPU its weights become float32, as a worker's do."""

    def __init__(self, name: str) -> None:
        network, _, self.tokenizer = read(name, find(name))
        if mx.default_device().type == mx.cpu:
            network.set_dtype(mx.float32)
            network = dequantize_model(network)
        mx.eval(network.parameters())
        self.network: Any = network
        self.tokenizer.eos_token_ids = set()  # no text ends before it has all its tokens

    async def passes(self, width: int, count: int, *, grows: bool) -> dict[str, float]:
        """Return milliseconds of passes that are waited for: a prompt, the first, and the median of the others.

        If the cache `grows`, each pass leaves one token more in it, as in decoding. Otherwise all see one length.
        """
        cache = make_prompt_cache(self.network)
        times = []
        for size in (_CACHED_TOKENS, *(width for _ in range(count))):
            tokens = _random_tokens(size)
            begun_at = time.perf_counter()
            mx.eval(mx.argmax(self.network(tokens, cache=cache), axis=-1))
            times.append(1000 * (time.perf_counter() - begun_at))
            trim_prompt_cache(cache, width - grows if len(times) > 1 else 0)
            await asyncio.sleep(0)  # where a time limit can end it
        prompt, first, *others = times
        return {"prompt_ms": prompt, "first_ms": first, "median_ms": median(others), "longest_ms": max(others)}

    async def generate(self, prompt: Sequence[int], max_tokens: int, draft: PlainModel | None = None) -> float:
        """Return the tokens per second of mlx-lm's `stream_generate`, with 3 draft tokens if there is a draft."""
        options: dict[str, Any] = {"draft_model": draft.network, "num_draft_tokens": 3} if draft else {}
        speed = 0.0
        for response in stream_generate(self.network, self.tokenizer, [*prompt], max_tokens=max_tokens, **options):
            speed = response.generation_tps
            await asyncio.sleep(0)
        return speed

    async def step_milliseconds(self, prompt: Sequence[int], max_tokens: int) -> float:
        """Return the median milliseconds of a token in mlx-lm's own loop, which describes one token ahead."""
        times, last_at = [], time.perf_counter()
        for _ in generate_step(mx.array([*prompt]), self.network, max_tokens=max_tokens):
            now = time.perf_counter()
            times.append(1000 * (now - last_at))
            last_at = now
            await asyncio.sleep(0)
        return median(times[1:])


def _random_tokens(count: int) -> mx.array:
    tokens = mx.random.randint(0, 1000, (1, count))
    mx.eval(tokens)
    return tokens

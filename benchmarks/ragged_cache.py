"""Caches of sessions of different length in one forward pass: three ways, in milliseconds a round.

    python benchmarks/ragged_cache.py [--sessions 8] [--widths 1 4 8] [--lengths 256 2048 16384] [--json FILE]

- by session: specd's (specd/worker/engine/forward.py). Each session has its own cache; a rewind moves a number.
- one buffer: all sessions in one buffer, each from its left end; a mask by length, and a rewind that moves a number.
- BatchKVCache: mlx-lm's, all sessions to the right end of one buffer, a rewind by `prepare` and `finalize`.

A round feeds as many tokens for each session, then rewinds each by another number. Lengths are spread over the upper
half of the one given. From 16,384 tokens on it is the draft model, in whose cache so many fit.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.worker.cpu.openblas import load_blas

BLAS = load_blas(os.cpu_count() or 1)

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.models.cache import BatchKVCache, KVCache  # noqa: E402

from specd.worker.engine.forward import BareCache, forward  # noqa: E402
from specd.worker.engine.jobs import Feed  # noqa: E402
from specd.worker.layers.session_layers import SessionLayers  # noqa: E402
from specd.worker.model.loader import LoadedModel, load  # noqa: E402

SMALL_MODEL_FROM = 16_384
BLOCK = 256


class OneBuffer:
    """One layer's keys and values of all sessions, [sessions, heads, length, size], each from its left end."""

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self.lengths = [cache.offset for cache in caches]
        room = (max(self.lengths) // BLOCK + 1) * BLOCK
        self.keys, self.values = (
            mx.concatenate([mx.pad(array, [(0, 0), (0, 0), (0, room - array.shape[2]), (0, 0)]) for array in arrays])
            for arrays in zip(*(cache.state[:2] for cache in caches), strict=True)
        )

    @property
    def offset(self) -> mx.array:
        return mx.array(self.lengths)

    def make_mask(self, width: int, **_: Any) -> mx.array:
        places = mx.arange(max(self.lengths) + width)
        rows = self.offset[:, None] + mx.arange(width)
        return places[None, None, None] <= rows[:, None, :, None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        width = keys.shape[2]
        for row, length in enumerate(self.lengths):
            self.keys[row, :, length : length + width] = keys[row]
            self.values[row, :, length : length + width] = values[row]
        self.lengths = [length + width for length in self.lengths]
        longest = max(self.lengths)
        return self.keys[:, :, :longest], self.values[:, :, :longest]


def fill(model: LoadedModel, lengths: Sequence[int]) -> list[list[KVCache]]:
    """Make caches of these lengths, of random keys and values: what they are does not matter for the time."""
    block = model.network.layers[0].self_attn
    heads, size = block.n_kv_heads, block.k_proj.weight.shape[0] // block.n_kv_heads
    mx.random.seed(0)
    sessions = []
    for length in lengths:
        layers = []
        for _ in model.network.layers:
            cache = KVCache()
            cache.update_and_fetch(*(mx.random.normal((1, heads, length, size)) for _ in range(2)))
            layers.append(cache)
        mx.eval([layer.state for layer in layers])
        sessions.append(layers)
    return sessions


def by_session(model: LoadedModel, sessions: list[list[KVCache]]) -> Callable[[mx.array, list[int]], mx.array]:
    caches = [BareCache(model.network, SessionLayers(model.network), True) for _ in sessions]
    for own, layers in zip(caches, sessions, strict=True):
        for ours, layer in zip(own.layers.caches, layers, strict=True):
            cast(Any, ours).update_and_fetch(*layer.keys_and_values())
        own.layers.fed(layers[0].offset)

    def round_(tokens: mx.array, surplus: list[int]) -> mx.array:
        logits = mx.stack(forward([Feed(cache, row) for cache, row in zip(caches, tokens, strict=True)]))
        mx.eval(mx.argmax(logits, -1))
        for cache, count in zip(caches, surplus, strict=True):
            cache.layers.rewind(cache.layers.num_fed - count)
        return logits

    return round_


def one_buffer(model: LoadedModel, sessions: list[list[KVCache]]) -> Callable[[mx.array, list[int]], mx.array]:
    layers = [OneBuffer(caches) for caches in zip(*sessions, strict=True)]

    def round_(tokens: mx.array, surplus: list[int]) -> mx.array:
        logits: mx.array = model.network(tokens, cache=layers)
        mx.eval(mx.argmax(logits, -1))
        for layer in layers:
            layer.lengths = [length - count for length, count in zip(layer.lengths, surplus, strict=True)]
        return logits

    return round_


def batch_kv_cache(model: LoadedModel, sessions: list[list[KVCache]]) -> Callable[[mx.array, list[int]], mx.array]:
    layers = [BatchKVCache.merge(caches) for caches in zip(*sessions, strict=True)]

    def round_(tokens: mx.array, surplus: list[int]) -> mx.array:
        logits: mx.array = model.network(tokens, cache=layers)
        mx.eval(mx.argmax(logits, -1))
        for layer in layers:
            layer.prepare(right_padding=[count - min(surplus) for count in surplus])
            layer.finalize()
            layer.trim(min(surplus))
        mx.eval([layer.keys for layer in layers], [layer.values for layer in layers])
        return logits

    return round_


WAYS = {"by session": by_session, "one buffer": one_buffer, "BatchKVCache": batch_kv_cache}


def measure(model: LoadedModel, length: int, width: int, num_sessions: int, repeats: int) -> dict[str, float]:
    """Return milliseconds a round, by way; raise AssertionError if they do not compute the same."""
    lengths = [length - i * length // (2 * num_sessions) for i in range(num_sessions)]
    tokens = mx.random.randint(2, model.info.vocabulary_size, (num_sessions, width))
    surplus = [(i + 1) % width if width > 1 else 0 for i in range(num_sessions)]
    rounds = {name: way(model, fill(model, lengths)) for name, way in WAYS.items()}
    times: dict[str, list[float]] = {name: [] for name in rounds}
    for repeat in range(repeats + 2):
        logits = {}
        for name, round_ in rounds.items():
            started_at = time.perf_counter()
            logits[name] = round_(tokens, surplus)
            times[name].append(time.perf_counter() - started_at)
        for name, own in logits.items():
            difference = float(np.abs(np.array(own - logits["by session"])).max())
            assert difference < 1e-2, f"{name} differs by {difference} in round {repeat}"
    return {name: 1000 * median(own[2:]) for name, own in times.items()}


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 2048, 16_384])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    models: dict[str, LoadedModel] = {}
    records = []
    print(f"{BLAS}, {options.sessions} sessions\nmodel   length  width  " + "  ".join(f"{name:>12}" for name in WAYS))
    for length in options.lengths:
        name = EMBEDDED_DRAFT if length >= SMALL_MODEL_FROM else EMBEDDED_TARGET
        if name not in models:
            models[name] = load(name, blas=BLAS)
        role = "draft" if name == EMBEDDED_DRAFT else "target"
        for width in options.widths:
            result = measure(models[name], length, width, options.sessions, options.repeats)
            times = "  ".join(f"{milliseconds:9.1f} ms" for milliseconds in result.values())
            print(f"{role:6}  {length:6}  {width:5}  {times}", flush=True)
            records.append({"model": role, "length": length, "width": width, **result})
    if options.json is not None:
        options.json.write_text(json.dumps({"blas": BLAS, "sessions": options.sessions, "rounds": records}, indent=1))


if __name__ == "__main__":
    main()

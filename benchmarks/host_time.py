"""The time that Python takes to describe a pass, and the operations in it: python benchmarks/host_time.py.

Networks of Qwen3's form with many small layers, so that describing is most of a pass, on any machine. A GPU waits for
this time in each round, because the tokens of a verify are known only when the proposal is there. Three measures, of
each way to compute a pass (`CONTENDERS`):

- describe: milliseconds from the call of the forward pass to its return; evaluate: from there to the result
- operations: nodes of the graph that was described; on a CPU, MLX describes norms, RoPE and attention in parts
- cache: a step of one token, and the memory that it takes for a while, when the cache has room for 8,192 tokens and
  holds few: a cache that is copied in a step takes longer and more than one with room for 256

Each way has a process of its own, because specd replaces functions of mlx-lm; they take turns. Medians of the turns.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from specd.bench.environment import console, environment, new_table
from specd.worker.cpu.openblas import load_blas

MLX_LM = "mlx-lm"
_CACHED_TOKENS = 60
_CAPACITIES = (256, 8192)
_CHUNK = 512
_REPEATS = 5

# Describe a pass over tokens [n], and return the logits [n, rows]; forget the last n tokens.
Feed = Callable[[Any], Any]
Rewind = Callable[[int], object]


def mlx_lm(network: Any) -> tuple[Feed, Rewind]:
    """Return the pass of mlx-lm's model on mlx-lm's cache."""
    from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

    cache = make_prompt_cache(network)
    return lambda tokens: network(tokens[None], cache=cache)[0], lambda count: trim_prompt_cache(cache, count)


def specd_forward(network: Any, *, is_compiled: bool = False, is_merged: bool = False) -> tuple[Feed, Rewind]:
    """Return the pass of a worker, in mlx-lm's own form or compiled, with the layers' own products or merged ones."""
    from specd.worker.engine import jobs
    from specd.worker.engine.forward import BareCache, enable_batches, forward, trial_logits
    from specd.worker.engine.merged_products import merge_products
    from specd.worker.engine.static_step import StaticStep
    from specd.worker.layers.session_layers import SessionLayers

    batches = enable_batches(network)
    if is_merged:
        merge_products(network, lambda: trial_logits(network))
    network.fixed_shapes = is_compiled
    layers = SessionLayers(network)
    static = StaticStep(network, 2 * max(_CAPACITIES)) if is_compiled else None
    cache = BareCache(network, layers, batches, static)
    return (
        lambda tokens: forward([jobs.Feed(cache, tokens)])[0],
        lambda count: layers.rewind(layers.num_fed - count),
    )


# Each takes a network, and returns how to feed its empty cache, and how to rewind it.
CONTENDERS: dict[str, Callable[[Any], tuple[Feed, Rewind]]] = {
    MLX_LM: mlx_lm,
    "specd, own form": specd_forward,
    "specd, compiled": partial(specd_forward, is_compiled=True),
    "specd, compiled, merged": partial(specd_forward, is_compiled=True, is_merged=True),
}


def serve(pipe: Connection, name: str, *, on_cpu: bool, threads: int) -> None:
    """Measure one contender: (layers, width) or a capacity comes through the pipe, and a result goes back."""
    load_blas(threads)
    import mlx.core as mx

    if on_cpu:
        mx.set_default_device(mx.cpu)
    ready: dict[int, tuple[Feed, Rewind]] = {}
    while (wanted := pipe.recv()) is not None:
        if isinstance(wanted, int):
            pipe.send(_measure_cache(CONTENDERS[name], wanted))
            continue
        layers, width = wanted
        if layers not in ready:
            ready = {layers: CONTENDERS[name](_network(layers))}
            mx.eval(ready[layers][0](mx.zeros(_CACHED_TOKENS, mx.uint32)))
        pipe.send(_measure_pass(*ready[layers], width))


def _network(layers: int, *, heads: int = 4, head_size: int = 32) -> Any:
    import mlx.core as mx
    from mlx_lm.models import qwen3

    config = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "intermediate_size": 128,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": head_size,
        "rms_norm_eps": 1e-6,
        "vocab_size": 512,
        "max_position_embeddings": 2 * max(_CAPACITIES),
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }
    mx.random.seed(0)
    network = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    mx.eval(network.parameters())
    return network


def _measure_pass(feed: Feed, rewind: Rewind, width: int) -> tuple[float, float, int]:
    """Return the milliseconds to describe and to evaluate a pass, the least of a few, and its operations."""
    import mlx.core as mx

    tokens = mx.zeros(width, mx.uint32)
    mx.eval(tokens)
    times = []
    for _ in range(_REPEATS):
        begun_at = time.perf_counter()
        logits = feed(tokens)
        described_at = time.perf_counter()
        mx.eval(logits)
        times.append((1000 * (described_at - begun_at), 1000 * (time.perf_counter() - described_at)))
        rewind(width)
    describe, evaluate = map(min, zip(*times, strict=True))
    logits = feed(tokens)
    operations = _num_operations(logits)
    mx.eval(logits)
    rewind(width)
    return describe, evaluate, operations


def _num_operations(logits: Any) -> int:
    """Return the number of operations that the logits need, without those that were evaluated before."""
    import mlx.core as mx

    written = io.StringIO()
    mx.export_to_dot(written, logits)
    return written.getvalue().count("shape=rectangle")


def _measure_cache(contender: Callable[[Any], tuple[Feed, Rewind]], capacity: int) -> tuple[float, float]:
    """Return the milliseconds of a step, and the megabytes that it takes, in a cache with room for `capacity` tokens.

    The cache has held nearly that many, and was rewound to few.
    """
    import mlx.core as mx

    feed, rewind = contender(_network(4, heads=8, head_size=64))
    held = capacity - 8
    for begin in range(0, held, _CHUNK):
        mx.eval(feed(mx.zeros(min(_CHUNK, held - begin), mx.uint32)))
    rewind(held - _CACHED_TOKENS)
    token = mx.zeros(1, mx.uint32)
    mx.eval(token)
    times, peaks = [], []
    for _ in range(4 * _REPEATS):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        begun_at = time.perf_counter()
        mx.eval(feed(token))
        times.append(1000 * (time.perf_counter() - begun_at))
        peaks.append((mx.get_peak_memory() - before) / 1e6)
        rewind(1)
    return median(times), median(peaks)


def main() -> None:
    """Measure, print the tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 36, 64])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=8, help=f"of {_REPEATS} passes by each contender")
    parser.add_argument("--cpu", action="store_true", help="not on the GPU, if there is one")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of BLAS, on a CPU")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()

    spawning = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name in CONTENDERS:
        pipes[name], theirs = spawning.Pipe()
        settings = {"on_cpu": options.cpu, "threads": options.threads}
        spawning.Process(target=serve, args=(theirs, name), kwargs=settings, daemon=True).start()
        theirs.close()  # so that a process that fails is not waited for

    def ask(name: str, wanted: Any) -> Any:
        pipes[name].send(wanted)
        return pipes[name].recv()

    output = console()
    passes: list[dict[str, Any]] = []
    table = new_table("layers, width, contender", ("describe\nms", "evaluate\nms", "operations", "describe /\nmlx-lm"))
    for layers in options.layers:
        for width in options.widths:
            rounds = [{name: ask(name, (layers, width)) for name in CONTENDERS} for _ in range(options.rounds + 1)]
            for name in CONTENDERS:
                describe, evaluate, operations = map(median, zip(*(own[name] for own in rounds[1:]), strict=True))
                ratio = median(own[name][0] / own[MLX_LM][0] for own in rounds[1:])
                row = {"describe_ms": describe, "evaluate_ms": evaluate, "operations": operations, "of_mlx_lm": ratio}
                passes.append({"layers": layers, "width": width, "contender": name, **row})
                table.add_row(
                    f"{layers}, {width}, {name}",
                    f"{describe:.2f}",
                    f"{evaluate:.2f}",
                    f"{operations:.0f}",
                    f"{ratio:.2f}",
                )
    output.print(table)

    caches: list[dict[str, Any]] = []
    headers = [f"{what}, room for\n{capacity:,}" for what in ("ms", "MB") for capacity in _CAPACITIES]
    table = new_table("a step of one token, 4 layers", (*headers, "ms / ms"))
    for name in CONTENDERS:
        (small, small_peak), (large, large_peak) = (ask(name, capacity) for capacity in _CAPACITIES)
        caches.append({"contender": name, "ms": [small, large], "megabytes": [small_peak, large_peak]})
        table.add_row(
            name, f"{small:.2f}", f"{large:.2f}", f"{small_peak:.2f}", f"{large_peak:.2f}", f"{large / small:.2f}"
        )
    output.print(table)
    for pipe in pipes.values():
        pipe.send(None)
    if options.json is not None:
        report = {"environment": environment(), "passes": passes, "caches": caches, "capacities": _CAPACITIES}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

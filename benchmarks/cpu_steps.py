"""Steps of an embedded model on the CPU, as mlx-lm has it and as a worker computes it.

    python benchmarks/cpu_steps.py [--model DIR] [--threads 2] [--widths 1 4 8 16 32] [--cached 256] [--rounds 15]

Two processes take turns: one loads the network as mlx-lm has it, the other as a worker does, with packed weights,
operations for x86 and layers under way while Python describes the next. Both have as many BLAS threads. The matrix
products alone are those of mlx-lm's network. A worker computes on all cores for a session that is alone; beside others
it leaves some to the draft. Medians, in milliseconds a step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import median

from specd.bench.environment import console, new_table
from specd.settings import EMBEDDED_TARGET
from specd.worker.cpu.openblas import load_blas

REPEATS = 5


def serve(pipe: Connection, model: str, threads: int, cached: int, *, optimize: bool) -> None:
    """Measure a step at each width that is asked for, and the products in it, or, optimised, one beside others."""
    blas = load_blas(threads)
    import mlx.core as mx
    from mlx import nn
    from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

    from specd.worker.cpu.streams import using_cores
    from specd.worker.model.loader import load

    mx.set_default_device(mx.cpu)
    network = load(model, blas=blas, is_optimized=optimize).network
    cache = make_prompt_cache(network)
    mx.eval(network(mx.zeros((1, cached), mx.uint32), cache=cache))
    weights = [part.weight for part in network.modules() if isinstance(part, (nn.Linear, nn.Embedding))]

    def step(width: int) -> None:
        mx.eval(mx.argmax(network(mx.zeros((1, width), mx.uint32), cache=cache), axis=-1))
        trim_prompt_cache(cache, width)

    def products(width: int) -> None:
        mx.eval([mx.ones((1, width, weight.shape[1])) @ weight.T for weight in weights])

    def step_beside_others(width: int) -> None:
        with using_cores(owns_all=False):
            step(width)

    other = step_beside_others if optimize else products
    while (width := pipe.recv()) is not None:
        pipe.send((_milliseconds(step, width), _milliseconds(other, width)))


def _milliseconds(compute: Callable[[int], None], width: int) -> float:
    times = []
    for _ in range(REPEATS):
        begun_at = time.perf_counter()
        compute(width)
        times.append(time.perf_counter() - begun_at)
    return 1000 * median(times)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED_TARGET)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--cached", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()

    spawning = multiprocessing.get_context("spawn")
    pipes = []
    for optimize in (False, True):
        pipe, theirs = spawning.Pipe()
        arguments = (theirs, options.model, options.threads, options.cached)
        spawning.Process(target=serve, args=arguments, kwargs={"optimize": optimize}, daemon=True).start()
        theirs.close()  # so that a process that fails is not waited for
        pipes.append(pipe)
    times: dict[int, list[tuple[float, float, float, float]]] = {width: [] for width in options.widths}
    for _ in range(options.rounds):
        for width, measured in times.items():
            answers = []
            for pipe in pipes:
                pipe.send(width)
                answers.append(pipe.recv())
            (plain, products), (alone, beside_others) = answers
            measured.append((products, plain, alone, beside_others))
    for pipe in pipes:
        pipe.send(None)
    headers = ("products", "mlx-lm", "specd", "beside others", "specd / mlx-lm", "/ beside others")
    table = new_table("tokens", headers)
    for width, measured in times.items():
        products, plain, alone, beside_others = (median(column) for column in zip(*measured, strict=True))
        cells = (f"{ms:.1f}" for ms in (products, plain, alone, beside_others))
        table.add_row(str(width), *cells, f"{alone / plain:.2f}", f"{alone / beside_others:.2f}")
    console().print(table)


if __name__ == "__main__":
    main()

"""The cost of caches that can be rewound: rounds on random models of a hundred million parameters, in process.

    python benchmarks/rewinds.py [--kinds falcon_h1 …] [-k 3] [--acceptance 0.7] [--prompt 300] [--rounds 60] [--json F]

A round is a pass of k + 1 tokens, and a rewind to those that are accepted. Three ways take turns, round by round, on
the same network: rounds at this acceptance, passes on our caches that are never rewound, and on mlx-lm's own caches,
which cannot be. Medians, of the first way for each number of accepted tokens, by its chance. A window model's prompt
goes past the edge of its window, so that mlx-lm's caches rotate.
The last column is the speed of eight sessions that decode in the same passes, over that of one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from specd.bench.environment import console, environment, new_table
from specd.worker.cpu.openblas import load_blas

SESSIONS = 8


def measure(kind: str, directory: Path, blas: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return medians in milliseconds, for one kind of model."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from random_models import save

    from specd.worker.engine.forward import BareCache, forward
    from specd.worker.engine.jobs import Feed
    from specd.worker.layers.session_layers import SessionLayers
    from specd.worker.model.loader import load

    model = load(save(kind, directory / kind), blas=blas, is_optimized=True)
    rng = random.Random(0)
    width = options.k + 1

    def tokens(count: int) -> mx.array:
        return mx.array([rng.randrange(model.info.vocabulary_size) for _ in range(count)])

    def begin() -> BareCache:
        cache = BareCache(model.network, SessionLayers(model.network), model.batches)
        mx.eval(forward([Feed(cache, tokens(options.prompt))]))
        return cache

    def seconds(feeds: list[Feed]) -> float:
        begun_at = time.perf_counter()
        mx.eval([mx.argmax(logits, axis=-1) for logits in forward(feeds)])
        return time.perf_counter() - begun_at

    # By how many tokens were accepted in the round before, whose rewind is computed in this one.
    after: list[list[float]] = [[] for _ in range(width)]
    accepted = options.k
    rewound, kept = begin(), begin()
    theirs = make_prompt_cache(model.network)
    mx.eval(model.network(tokens(options.prompt)[None], cache=theirs))
    many = [begin() for _ in range(SESSIONS)]
    times: dict[str, list[float]] = {name: [] for name in ("never rewound", "mlx-lm", "one", "eight")}
    for _ in range(options.rounds):
        after[accepted].append(seconds([Feed(rewound, tokens(width))]))
        accepted = next((i for i in range(options.k) if rng.random() >= options.acceptance), options.k)
        position = rewound.layers.num_fed - options.k + accepted
        assert rewound.layers.rewind(position) == position
        times["never rewound"].append(seconds([Feed(kept, tokens(width))]))
        begun_at = time.perf_counter()
        mx.eval(mx.argmax(model.network(tokens(width)[None], cache=theirs), axis=-1))
        times["mlx-lm"].append(time.perf_counter() - begun_at)
        times["one"].append(seconds([Feed(many[0], tokens(1))]))
        times["eight"].append(seconds([Feed(cache, tokens(1)) for cache in many]))
    own = {name: 1000 * median(measured[2:]) for name, measured in times.items()}
    chances = [(1 - options.acceptance) * options.acceptance**i for i in range(options.k)]
    chances.append(1 - sum(chances))
    drawn = [(chance, 1000 * median(of)) for chance, of in zip(chances, after, strict=True) if of]
    own = {"rewound": sum(chance * ms for chance, ms in drawn) / sum(chance for chance, _ in drawn)} | own
    return own | {
        "rewound / never rewound": own["rewound"] / own["never rewound"],
        "rewound / mlx-lm": own["rewound"] / own["mlx-lm"],
        "eight / one": SESSIONS * own["one"] / own["eight"],
    }


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ["qwen3", "gemma3_text", "falcon_h1", "qwen3_5", "granitemoehybrid", "mamba2"]
    parser.add_argument("--kinds", nargs="+", default=kinds, metavar="KIND", choices=kinds)
    parser.add_argument("-k", type=int, default=3)
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--prompt", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    blas = load_blas(options.threads)
    results = {}
    with TemporaryDirectory() as directory:
        for kind in options.kinds:
            results[kind] = measure(kind, Path(directory), blas, options)
    table = new_table("ms", results[kind])
    for kind, values in results.items():
        table.add_row(kind, *(f"{value:.2f}" for value in values.values()))
    console().print(table)
    if options.json is not None:
        report = {"environment": environment(blas=blas), "results": results}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

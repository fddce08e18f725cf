"""A rank that computes the same passes as all others, without plans, and saves their logits.

python -m tests.worker.rank_process RANK ADDRESSES MODEL FILE
"""

from __future__ import annotations

import faulthandler
import json
import resource
import sys
from pathlib import Path

import numpy as np


def passes(model: object, length: int = 40) -> list[np.ndarray]:
    """Return the logits of a prompt, single tokens, a verify behind a rewind, and a pass of two sessions."""
    import mlx.core as mx

    from specd.worker.engine.forward import bare_cache, forward
    from specd.worker.engine.jobs import Feed

    caches = [bare_cache(model.network, batches=model.batches) for _ in range(2)]  # type: ignore[attr-defined]
    logits: list[np.ndarray] = []

    def feed(*fed: tuple[int, list[int]]) -> None:
        rows = forward([Feed(caches[i], mx.array(ids)) for i, ids in fed])
        mx.eval(rows)
        logits.extend(np.array(each.astype(mx.float32)) for each in rows)

    feed((0, [(37 * i) % 8000 for i in range(length)]))
    feed((0, [5]))
    feed((0, [6, 7, 8, 9, 10]))
    caches[0].layers.rewind(length + 3)
    feed((0, [11, 12, 13, 14, 15]))
    feed((1, [1, 2, 3]))
    feed((0, [16, 17]), (1, [4, 5, 6]))
    return logits


def main(rank: int, addresses: list[str], name: str, file: Path) -> None:
    """Compute on one rank of several."""
    faulthandler.enable()
    from specd.worker.cpu.openblas import load_blas

    blas = load_blas(1)
    import mlx.core as mx

    from specd.worker.model.loader import load
    from specd.worker.model.sharding import Shard
    from specd.worker.ranks.data_plane import join_collectives

    part = Shard(join_collectives(rank, addresses, "ring"), "ring", lambda _: None)
    model = load(name, blas=blas, part=part)
    logits = passes(model)
    np.savez(file, *logits)
    facts = {
        "device": model.info.device,
        "batches": model.batches,
        "bytes_per_token": model.cache_footprint.bytes_for(1),
        "peak_bytes": mx.get_peak_memory(),
        "resident_kilobytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3], Path(sys.argv[4]))

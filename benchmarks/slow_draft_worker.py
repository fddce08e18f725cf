"""A draft worker with steps that take longer by some milliseconds; the further arguments are `specd`'s.

python benchmarks/slow_draft_worker.py 20 draft-worker --listen 127.0.0.1:50052
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from specd.cli import main
from specd.worker.cpu import openblas as blas


def slow_down(seconds: float) -> None:
    """Let every forward pass of this process begin with a pause, the ones that measure what steps cost included."""
    load_blas = blas.load_blas

    def load_blas_and_patch(num_threads: int) -> str:
        loaded = load_blas(num_threads)
        # MLX comes in here, after its BLAS, and before the engine and the calibration take `forward` from there.
        from specd.worker.engine import forward as batch
        from specd.worker.engine.jobs import Feed

        forward = batch.forward

        def slow_forward(feeds: Sequence[Feed]) -> list[Any]:
            time.sleep(seconds)
            return forward(feeds)

        batch.forward = slow_forward  # type: ignore[assignment]
        return loaded

    blas.load_blas = load_blas_and_patch


if __name__ == "__main__":
    slow_down(float(sys.argv[1]) / 1000)
    main(sys.argv[2:])

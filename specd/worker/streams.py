"""The streams of a thread, on each of which a CPU computes beside the others."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx

# From here on two streams, with what it takes to part and to join the rows, are faster than one.
ROWS_FOR_ALL_STREAMS = 48
# Rows are shared out where there are no more streams than so many.
MOST_STREAMS = 4


class Streams(threading.local):
    """One stream for each thread that BLAS was given, and on a GPU one: it does one thing after another in any case.

    A stream of the CPU backend is a thread, and only one: what BLAS does not share out among its own takes several.
    """

    def __init__(self) -> None:
        device = mx.default_device()
        count = int(os.environ.get("OPENBLAS_NUM_THREADS") or 1) if device.type == mx.cpu else 1
        self.all: list[Any] = [mx.default_stream(device), *(mx.new_stream(device) for _ in range(count - 1))]


STREAMS = Streams()


def spread(num_rows: int, compute: Callable[[slice], mx.array], *, axis: int, multiple: int = 1) -> mx.array:
    """Return what is computed of so many rows, in shares of such a multiple, each on a stream of its own.

    `axis` is that of the rows in what is computed of a share.
    """
    share = -(-num_rows // len(STREAMS.all) // multiple) * multiple
    parts = []
    for stream, begin in zip(STREAMS.all, range(0, num_rows, share), strict=False):
        with mx.stream(stream):
            parts.append(compute(slice(begin, min(begin + share, num_rows))))
    return mx.concatenate(parts, axis=axis)

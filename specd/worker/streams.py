"""The streams of a thread, on each of which a CPU computes beside the others."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any, TypeVar

import mlx.core as mx

Result = TypeVar("Result")

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
        # Whether the other cores have nothing else to do, so that sharing few rows out pays as well.
        self.are_free = True


STREAMS = Streams()


def can_share(num_rows: int) -> bool:
    """Whether what is to be computed of so many rows should be shared out."""
    return len(STREAMS.all) > 1 and (STREAMS.are_free or num_rows >= ROWS_FOR_ALL_STREAMS)


def share_out(computations: Sequence[Callable[[], Result]]) -> list[Result]:
    """Return what is computed, each share on a stream of its own as long as there are any."""
    results = []
    for stream, compute in zip(cycle(STREAMS.all), computations, strict=False):
        with mx.stream(stream):
            results.append(compute())
    return results


def even_parts(weights: Sequence[int]) -> list[slice]:
    """Part things in a row, at least one, into as many parts as there are streams, or fewer, of like weight."""
    ends: list[int] = []
    total, before = sum(weights), 0
    for i, weight in enumerate(weights):
        # A part ends with what has most of its weight before the part's share is full.
        if (before + weight / 2) * len(STREAMS.all) >= total * (len(ends) + 1) and i > (ends[-1] if ends else 0):
            ends.append(i)
        before += weight
    return [slice(begin, end) for begin, end in zip([0, *ends], [*ends, len(weights)], strict=True)]


def spread(num_rows: int, compute: Callable[[slice], mx.array], *, axis: int, multiple: int = 1) -> mx.array:
    """Return what is computed of so many rows, in shares of such a multiple, each on a stream of its own.

    `axis` is that of the rows in what is computed of a share.
    """
    share = -(-num_rows // len(STREAMS.all) // multiple) * multiple
    shares = [slice(begin, min(begin + share, num_rows)) for begin in range(0, num_rows, share)]
    return mx.concatenate(share_out([partial(compute, rows) for rows in shares]), axis=axis)

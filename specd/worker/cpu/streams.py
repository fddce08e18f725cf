"""The streams of a thread. A CPU computes on several streams at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, cycle
from typing import Any, TypeVar

import mlx.core as mx

from specd.worker.cpu import openblas

Result = TypeVar("Result")

# With at least this many rows, two streams are faster than one, including the time to split and to join the rows.
ROWS_FOR_ALL_STREAMS = 48
# Rows are shared out to at most this many streams.
MOST_STREAMS = 4
# With at least this many attention weights, over all rows and heads, sessions are shared out to the cores.
_WEIGHTS_FOR_ALL_STREAMS = 20_000


class Streams(threading.local):
    """One stream for each thread of BLAS. A GPU has one stream, because it computes one thing after another anyway.

    A stream of the CPU backend is one thread: products that BLAS does not share out need several streams. The number of
    streams decides the order of sums, so the last bits of results depend on `--blas-threads`.
    """

    def __init__(self) -> None:
        device = mx.default_device()
        count = openblas.num_threads() if device.type == mx.cpu else 1
        self.made: list[Any] = [mx.default_stream(device), *(mx.new_stream(device) for _ in range(count - 1))]
        self.all = self.made
        # Whether the other cores are idle, so that sharing out few rows pays as well.
        self.owns_all_cores = True


STREAMS = Streams()


def use_threads(count: int) -> None:
    """Compute with this many threads from now on, as a process that was started with them. For the loading thread."""
    openblas.use_threads(count)
    STREAMS.all = STREAMS.made[:count]


def has_several_cores() -> bool:
    """Return whether MLX computes on several cores of a CPU."""
    return bool(mx.default_device().type == mx.cpu) and openblas.num_threads() > 1


@contextmanager
def using_cores(*, owns_all: bool) -> Iterator[None]:
    """Describe computations for a thread that owns all cores, or shares them with other processes."""
    STREAMS.owns_all_cores = owns_all
    try:
        yield
    finally:
        STREAMS.owns_all_cores = True


def can_share(num_rows: int) -> bool:
    """Return whether a computation on this many rows should be shared out to the streams."""
    return len(STREAMS.all) > 1 and (STREAMS.owns_all_cores or num_rows >= ROWS_FOR_ALL_STREAMS)


def share_out(computations: Sequence[Callable[[], Result]]) -> list[Result]:
    """Return the results of the computations, each on a stream of its own while there are enough streams."""
    results = []
    for stream, compute in zip(cycle(STREAMS.all), computations, strict=False):
        with mx.stream(stream):
            results.append(compute())
    return results


def share_sessions(
    num_rows: int, num_weights: Sequence[int], attend: Callable[[slice], list[mx.array]]
) -> list[mx.array]:
    """Return the results of `attend` for all sessions, called for all at once or for some sessions on each stream.

    The sessions have this many rows together, and `num_weights` attention weights each.
    """
    parts = [slice(0, len(num_weights))]
    if can_share(num_rows) and openblas.keeps_to_one_thread() and sum(num_weights) >= _WEIGHTS_FOR_ALL_STREAMS:
        parts = even_parts(num_weights)
    return [*chain.from_iterable(share_out([partial(attend, part) for part in parts]))]


def even_parts(weights: Sequence[int]) -> list[slice]:
    """Divide a sequence that is not empty into parts of about equal weight, at most one for each stream."""
    ends: list[int] = []
    total, before = sum(weights), 0
    for i, weight in enumerate(weights):
        # The part ends before the first item that lies mostly beyond the part's share.
        if (before + weight / 2) * len(STREAMS.all) >= total * (len(ends) + 1) and i > (ends[-1] if ends else 0):
            ends.append(i)
        before += weight
    return [slice(begin, end) for begin, end in zip([0, *ends], [*ends, len(weights)], strict=True)]


def spread(num_rows: int, compute: Callable[[slice], mx.array], *, axis: int, multiple: int = 1) -> mx.array:
    """Return the results of `compute` for shares of the rows, each on a stream of its own, joined along `axis`.

    Shares are multiples of `multiple` rows.
    """
    share = -(-num_rows // len(STREAMS.all) // multiple) * multiple
    shares = [slice(begin, min(begin + share, num_rows)) for begin in range(0, num_rows, share)]
    return mx.concatenate(share_out([partial(compute, rows) for rows in shares]), axis=axis)


def use_one_stream() -> None:
    """Compute on one stream in this thread from now on, so that collectives have an order."""
    del STREAMS.all[1:]

"""The streams of a thread, on each of which a CPU computes beside the others."""

from __future__ import annotations

import os
import threading
from typing import Any

import mlx.core as mx


class Streams(threading.local):
    """One stream for each thread that BLAS has, and on a GPU one: it does one thing after another in any case.

    A stream of the CPU backend is a thread, and only one: what BLAS does not share out among its own takes several.
    """

    def __init__(self) -> None:
        device = mx.default_device()
        count = int(os.environ.get("OPENBLAS_NUM_THREADS") or 1) if device.type == mx.cpu else 1
        self.all: list[Any] = [mx.default_stream(device), *(mx.new_stream(device) for _ in range(count - 1))]


STREAMS = Streams()

"""The seconds of a step of two ranks, with the plans of rank 0 and without.

python benchmarks/rank_steps.py MODEL STEPS prints the milliseconds by width, as JSON: medians of turns.

Without plans, both ranks know the steps, and no answer is awaited: what is left is the computation and the sums.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from specd.worker.cpu.openblas import load_blas

BLAS = load_blas(1)

import mlx.core as mx

from specd.v1.ranks_pb2 import Meeting, RankMessage, StepAck
from specd.worker.engine.forward import bare_cache, forward
from specd.worker.engine.jobs import Feed
from specd.worker.model.loader import LoadedModel, load
from specd.worker.model.sharding import Shard
from specd.worker.ranks.connection import RankConnection
from specd.worker.ranks.data_plane import free_port, join_collectives
from specd.worker.ranks.interpreter import PlanInterpreter
from specd.worker.ranks.passes import Passes
from specd.worker.ranks.ranks import Ranks
from specd.worker.ranks.watch import Watch

WIDTHS = (1, 5)
CACHED, TURNS = 64, 9


def measure(model: LoadedModel, steps: int, *, passes: Passes | None = None) -> dict[str, float]:
    """Return the median milliseconds of a step by width; `passes` evaluate it where no plan does."""
    medians = {}
    for width in WIDTHS:
        cache = bare_cache(model.network, batches=model.batches)
        seconds = []
        for i in range(steps + 1):
            feed = [Feed(cache, mx.array([7] * (width if i else CACHED), mx.uint32))]
            began_at = time.perf_counter()
            if passes is not None:
                passes.evaluate(feed, forward)
            else:
                forward(feed)
            seconds.append(time.perf_counter() - began_at)
            cache.layers.rewind(CACHED)
        medians[str(width)] = 1000 * statistics.median(seconds[1:])
    return medians


def lead(name: str, steps: int) -> None:
    """Measure as rank 0, and print the result."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        addresses = [f"127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2)]
        command = [sys.executable, __file__, name, str(steps), *addresses, str(server.getsockname()[1])]
        follower = subprocess.Popen(command)
        sock, _ = server.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = RankConnection(sock, "the follower")
    model = load(name, blas=BLAS, part=Shard(join_collectives(0, addresses, "ring"), "ring", lambda _: None))
    ranks = Ranks([connection], Watch(60.0), deadline_seconds=60.0, hang_seconds=60.0, end=sys.exit)
    ranks.attach(model.network)
    planned = {name: getattr(model.network, name) for name in ("make_mirror", "compute_with_others")}
    times: dict[str, list[list[float]]] = {str(width): [[], []] for width in WIDTHS}
    for _ in range(TURNS):
        model.network.make_mirror, model.network.compute_with_others = lambda: None, None
        for width, milliseconds in measure(model, steps // TURNS, passes=ranks._passes).items():
            times[width][0].append(milliseconds)
        model.network.make_mirror, model.network.compute_with_others = planned.values()
        for width, milliseconds in measure(model, steps // TURNS).items():
            times[width][1].append(milliseconds)
        connection.send(RankMessage(meeting=Meeting()))
    ranks.close()
    follower.wait()
    print(json.dumps({width: [*map(statistics.median, both)] for width, both in times.items()}), flush=True)


def follow(name: str, steps: int, addresses: list[str], port: int) -> None:
    """Compute the same steps, then those of the plans."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = RankConnection(sock, "rank 0")
    connection.is_welcome = True
    model = load(name, blas=BLAS, part=Shard(join_collectives(1, addresses, "ring"), "ring", lambda _: None))
    interpreter: Any = PlanInterpreter(model)
    for _ in range(TURNS):
        measure(model, steps // TURNS, passes=interpreter._passes)
        while (message := connection.receive()).WhichOneof("kind") == "plan":
            if (checksum := interpreter.run(message.plan)) is not None:
                connection.send(RankMessage(ack=StepAck(step=message.plan.step, checksum=checksum)))


if len(sys.argv) == 3:
    lead(sys.argv[1], int(sys.argv[2]))
else:
    follow(sys.argv[1], int(sys.argv[2]), sys.argv[3:5], int(sys.argv[5]))
os._exit(0)

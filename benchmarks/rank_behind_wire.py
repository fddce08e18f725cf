"""A rank of a target, with a wire of `wire_faults.py` for the sums of all ranks.

SIGUSR1 cuts the wire for ever, SIGUSR2 lets nothing through for ever, as on a half-open connection, and SIGHUP delays
each piece of data by 20 ms for three seconds. The variable WIRE_DELAY_SECONDS delays it always, and PASS_SECONDS makes
each pass of rank 0 longer, as slow sums would.
The arguments are those of `specd target-worker`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from typing import IO, Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from wire_faults import Wire

import specd.launch
from specd.settings import TargetWorkerSettings


def wired(address: str) -> str:
    """Return the address of a wire to an address of the next rank.

    It is a process, because MLX connects the ranks without a release of Python's lock. It ends with this one.
    """
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import rank_behind_wire as r; r.serve()"
    command = [sys.executable, "-c", code, address, os.environ.get("WIRE_DELAY_SECONDS", "0")]
    wire = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert wire.stdin is not None
    assert wire.stdout is not None
    COMMANDS.append(wire.stdin)
    return f"127.0.0.1:{int(wire.stdout.readline())}"


def serve() -> None:
    """Run a wire: the arguments are an address and a delay, and each line of standard input is a command."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        async with Wire("127.0.0.1:0", sys.argv[1], float(sys.argv[2])) as wire:
            wire.waits = True
            print(wire.port, flush=True)
            while command := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
                if command == "cut":
                    break
                if command == "slow":
                    wire.delay_seconds = 0.02
                    loop.call_later(3, setattr, wire, "delay_seconds", float(sys.argv[2]))
                else:
                    asyncio.ensure_future(wire.hold(1e6))  # noqa: RUF006
        os._exit(0)

    asyncio.run(run())


COMMANDS: list[IO[str]] = []
NAMES = {signal.SIGUSR1: "cut", signal.SIGUSR2: "hold", signal.SIGHUP: "slow"}


def watch_signals() -> None:
    """Pass signals on to the wire, in a thread, because the main thread may be in a collective."""
    while True:
        name = NAMES[signal.Signals(signal.sigwait(NAMES))]
        COMMANDS[-1].write(f"{name}\n")
        COMMANDS[-1].flush()


def main() -> None:
    """Run the worker."""
    signal.pthread_sigmask(signal.SIG_BLOCK, NAMES)
    threading.Thread(target=watch_signals, daemon=True).start()

    async def run(settings: TargetWorkerSettings) -> None:
        from specd.worker.cpu.openblas import load_blas

        load_blas(settings.blas_threads)
        from specd.worker.ranks import data_plane, follower, gathering, ranks

        plain = data_plane.join_collectives

        @wraps(plain)
        def join(rank: int, addresses: Sequence[str], backend: str, seconds: float = 30.0) -> Any:
            following = (rank + 1) % len(addresses)
            mine = [wired(each) if i == following else each for i, each in enumerate(addresses)]
            return plain(rank, mine, backend, seconds)

        gathering.join_collectives = follower.join_collectives = join  # type: ignore[attr-defined]
        if pass_seconds := float(os.environ.get("PASS_SECONDS", "0")):
            step = ranks.Ranks.step

            def slow_step(*arguments: Any) -> Any:
                time.sleep(pass_seconds)
                return step(*arguments)

            ranks.Ranks.step = slow_step  # type: ignore[method-assign, assignment]
        from target_worker.main import run as run_worker

        await run_worker(settings)

    app = specd.launch.new_app("target-worker")

    @app.command()
    @specd.launch.settings_options(TargetWorkerSettings)
    def command(settings: TargetWorkerSettings) -> None:
        specd.launch.start_logging("target-worker")
        asyncio.run(run(settings))

    specd.launch.run_app(app)


if __name__ == "__main__":
    main()

"""A rank of a target whose sums travel over a wire of `wire_faults.py`.

SIGUSR1 cuts the wire for ever, SIGUSR2 lets nothing through for ever, as on a half-open connection. The variable
WIRE_DELAY_SECONDS delays each piece of data, and PASS_SECONDS makes each pass of rank 0 longer, as slow sums would.
The arguments are those of `specd target-worker`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import wraps
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from wire_faults import Wire

import specd.launch
from specd.settings import TargetWorkerSettings


def wired(address: str) -> str:
    """Return the address of a wire to an address of the next rank."""
    began: Future[str] = Future()

    async def serve() -> None:
        loop, cutting = asyncio.get_running_loop(), asyncio.Event()
        async with Wire("127.0.0.1:0", address, float(os.environ.get("WIRE_DELAY_SECONDS", "0"))) as wire:
            FAULTS[signal.SIGUSR1] = lambda: loop.call_soon_threadsafe(cutting.set)
            FAULTS[signal.SIGUSR2] = lambda: asyncio.run_coroutine_threadsafe(wire.hold(1e6), loop)
            began.set_result(f"127.0.0.1:{wire.port}")
            await cutting.wait()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    return began.result()


FAULTS: dict[int, Any] = {}


def watch_signals() -> None:
    """Wait for signals in a thread, because the main thread may be in a collective."""
    while True:
        FAULTS[signal.sigwait({signal.SIGUSR1, signal.SIGUSR2})]()


def main() -> None:
    """Run the worker."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    threading.Thread(target=watch_signals, daemon=True).start()

    async def run(settings: TargetWorkerSettings) -> None:
        from specd.worker.cpu.openblas import load_blas

        load_blas(settings.blas_threads)
        from specd.worker.ranks import follower, gathering, ranks

        plain = gathering.join_collectives

        @wraps(plain)
        def join(rank: int, addresses: Sequence[str], backend: str) -> Any:
            following = (rank + 1) % len(addresses)
            mine = [wired(each) if i == following else each for i, each in enumerate(addresses)]
            return plain(rank, mine, backend)

        gathering.join_collectives = follower.join_collectives = join  # type: ignore[attr-defined]
        if pass_seconds := float(os.environ.get("PASS_SECONDS", "0")):
            step = ranks.Ranks.step

            def slow_step(*arguments: Any) -> Any:
                time.sleep(pass_seconds)
                return step(*arguments)

            ranks.Ranks.step = slow_step  # type: ignore[method-assign]
        from target_worker.main import run as run_worker

        await run_worker(settings)

    app = specd.launch.new_app("target-worker")

    @app.command()
    @specd.launch.settings_options(TargetWorkerSettings)
    def command(settings: TargetWorkerSettings) -> None:
        specd.launch.start_logging("target-worker")
        asyncio.run(run(settings))

    specd.launch.run_app(app)


main()

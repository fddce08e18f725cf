"""The time in which a turn is kept: in a file, and on a Valkey or Redis server.

    python benchmarks/kept_turns.py [--tokens 2000] [--server redis://127.0.0.1:6379]

A turn is taken and kept 500 times, of conversations with these tokens and as many bytes of text. Without a server, the
file alone is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from array import array
from pathlib import Path

from coordinator.sessions.session_file import SessionFile
from coordinator.sessions.session_keeper import SessionKeeper
from coordinator.sessions.session_server import SessionServer
from coordinator.sessions.session_store import SessionStore
from specd.bench.environment import console, new_table
from specd.text.chat import Chat

NUM_TURNS, NUM_SESSIONS = 500, 50


async def turns(keeper: SessionKeeper, store: SessionStore, num_tokens: int) -> list[float]:
    """Return the seconds of each turn, sorted."""
    chat = Chat(tuple({"role": "user", "content": "x" * 100} for _ in range(num_tokens // 100)))
    seconds = []
    for i in range(NUM_TURNS):
        session_id = f"{i % NUM_SESSIONS}"
        began_at = time.perf_counter()
        await keeper.take(session_id, "")
        known = store.peek(session_id, "")
        session = store.acquire(session_id, "") if known else store.begin(session_id, "")
        store.finish(session, array("I", range(num_tokens)), chat)
        await keeper.save(session)
        seconds.append(time.perf_counter() - began_at)
    return sorted(seconds)


async def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--server", help="URL of a server for this measurement alone")
    options = parser.parse_args()
    table = new_table("ms a turn", ["median", "99 %"])
    with tempfile.TemporaryDirectory() as directory:
        store = SessionStore(600, 10**9, time.time, time.monotonic)
        keepers: dict[str, SessionKeeper] = {"file": SessionFile(Path(directory) / "sessions")}
        if options.server:
            keepers["server"] = SessionServer(options.server, "benchmark", store, 600)
        for name, keeper in keepers.items():
            seconds = await turns(keeper, store, options.tokens)
            table.add_row(name, f"{1e3 * seconds[NUM_TURNS // 2]:.2f}", f"{1e3 * seconds[-NUM_TURNS // 100]:.2f}")
            await keeper.close()
    console().print(table)


if __name__ == "__main__":
    asyncio.run(main())

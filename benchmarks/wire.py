"""What a message there and back costs on an open stream, by how long both ends have slept: python benchmarks/wire.py.

Two processes and no model: TargetService.Verify answered at once, over a Unix socket. A round has two such exchanges,
after idle times of the length of a draft's and a target's work. Prints a table, and JSON with --json FILE.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

IDLE_MILLISECONDS = (0, 5, 20)
POLLERS = {"event engine": "", "older pollers": "-event_engine_client,-event_engine_listener"}


def serve(address: str) -> None:
    import grpc

    from specd.v1 import target_pb2, target_pb2_grpc

    class Echo(target_pb2_grpc.TargetServiceServicer):
        async def Verify(
            self, requests: AsyncIterator[target_pb2.VerifyRequest], context: object
        ) -> AsyncIterator[target_pb2.VerifyResponse]:
            async for request in requests:
                yield target_pb2.VerifyResponse(round=request.round)

    async def run() -> None:
        server = grpc.aio.server()
        target_pb2_grpc.add_TargetServiceServicer_to_server(Echo(), server)
        server.add_insecure_port(address)
        await server.start()
        await server.wait_for_termination()

    asyncio.run(run())


def measure(address: str, exchanges: int) -> dict[int, float]:
    """Return the median milliseconds of an exchange by the idle time before it."""
    import grpc

    from specd.v1 import target_pb2, target_pb2_grpc

    async def run() -> dict[int, float]:
        medians = {}
        async with grpc.aio.insecure_channel(address) as channel:
            call = target_pb2_grpc.TargetServiceStub(channel).Verify(wait_for_ready=True)
            for idle in IDLE_MILLISECONDS:
                times = []
                for number in range(exchanges):
                    await asyncio.sleep(idle / 1000)
                    started_at = time.perf_counter()
                    await call.write(target_pb2.VerifyRequest(round=number, token_ids=[1], proposal=[2, 3, 4, 5]))
                    await call.read()
                    times.append(time.perf_counter() - started_at)
                medians[idle] = 1000 * statistics.median(times)
            call.cancel()
        return medians

    return asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exchanges", type=int, default=200, help="for each idle time")
    parser.add_argument("--json", type=Path, help="write the medians to this file")
    parser.add_argument("--role", choices=["server", "client"], help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "server":
        serve(arguments.address)
        return
    if arguments.role == "client":
        print(json.dumps(measure(arguments.address, arguments.exchanges)))
        return

    results = {}
    print(f"{'median ms after idle ms':24}" + "".join(f"{idle:>8}" for idle in IDLE_MILLISECONDS))
    for name, experiments in POLLERS.items():
        environment = {**os.environ, "GRPC_EXPERIMENTS": experiments}
        with tempfile.TemporaryDirectory(prefix="specd-") as directory:
            address = f"unix:{directory}/socket"
            command = [
                sys.executable,
                __file__,
                "--address",
                address,
                "--exchanges",
                str(arguments.exchanges),
                "--role",
            ]
            with subprocess.Popen([*command, "server"], env=environment) as server:
                client = subprocess.run([*command, "client"], env=environment, check=True, capture_output=True)
                server.terminate()
        results[name] = json.loads(client.stdout)
        print(f"{name:24}" + "".join(f"{value:8.2f}" for value in results[name].values()))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The cost of a message and its answer on an open stream, by wire and by how long both ends have slept, and what of it
TLS costs: python benchmarks/wire.py.

Two processes and no model: TargetService.Verify answered at once, over a Unix socket, over loopback, and over loopback
with TLS and certificates at both ends, as `specd certs` makes them. The wires take turns, message by message. A round
has two such exchanges, after idle times of the length of a draft's and a target's work. Prints tables, and JSON with
--json FILE.
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
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

IDLE_MILLISECONDS = (0, 5, 20)
POLLERS = {"event engine": "", "older pollers": "-event_engine_client,-event_engine_listener"}
WIRES = ("Unix socket", "loopback", "loopback, TLS")
_EXCHANGES_A_ROUND = 2


def serve(directory: Path) -> None:
    """Serve on all wires; write where to `addresses`."""
    import grpc

    from specd.identity.certificates import CertificateFiles, Certificates
    from specd.identity.roles import Role
    from specd.rpc.credentials import server_credentials
    from specd.v1 import target_pb2, target_pb2_grpc

    class Echo(target_pb2_grpc.TargetServiceServicer):
        async def Verify(
            self, requests: AsyncIterator[target_pb2.VerifyRequest], context: object
        ) -> AsyncIterator[target_pb2.VerifyResponse]:
            async for request in requests:
                yield target_pb2.VerifyResponse(round=request.round)

    async def run() -> None:
        role = Role.TARGET_WORKER
        files = CertificateFiles(directory / f"{role}.crt", directory / f"{role}.key", directory / "ca.crt")
        credentials = server_credentials(Certificates(files, role=role), wants_certificate=True)
        server = grpc.aio.server()
        target_pb2_grpc.add_TargetServiceServicer_to_server(Echo(), server)
        unix = f"unix:{directory}/socket"
        server.add_insecure_port(unix)
        plain, tls = server.add_insecure_port("127.0.0.1:0"), server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        beside = directory / "addresses.new"
        beside.write_text(json.dumps([unix, f"127.0.0.1:{plain}", f"127.0.0.1:{tls}"]))
        beside.rename(directory / "addresses")
        await server.wait_for_termination()

    asyncio.run(run())


def measure(directory: Path, exchanges: int) -> dict[str, dict[int, float]]:
    """Return the median milliseconds of an exchange by wire, and by the idle time before it."""
    from specd.identity.roles import Role
    from specd.rpc.channel import open_channel
    from specd.rpc.credentials import PLAIN, ClientCredentials
    from specd.v1 import target_pb2, target_pb2_grpc

    role, worker = Role.COORDINATOR, Role.TARGET_WORKER
    tls = ClientCredentials(
        directory / "ca.crt", directory / f"{role}.crt", directory / f"{role}.key", server_name=worker.dns_name
    )

    async def exchange(call: Any, number: int) -> float:
        started_at = time.perf_counter()
        await call.write(target_pb2.VerifyRequest(round=number, token_ids=[1], proposal=[2, 3, 4, 5]))
        await call.read()
        return time.perf_counter() - started_at

    async def run() -> dict[str, dict[int, float]]:
        calls: dict[str, Any] = {}
        async with AsyncExitStack() as stack:
            addresses = json.loads((directory / "addresses").read_text())
            for wire, address, credentials in zip(WIRES, addresses, (PLAIN, PLAIN, tls), strict=True):
                channel = await stack.enter_async_context(open_channel(address, credentials))
                calls[wire] = target_pb2_grpc.TargetServiceStub(channel).Verify(wait_for_ready=True)
                await exchange(calls[wire], 0)
            medians: dict[str, dict[int, float]] = {wire: {} for wire in WIRES}
            for idle in IDLE_MILLISECONDS:
                times: dict[str, list[float]] = {wire: [] for wire in WIRES}
                for number in range(exchanges):
                    for wire, call in calls.items():
                        await asyncio.sleep(idle / 1000)
                        times[wire].append(await exchange(call, number))
                for wire in WIRES:
                    medians[wire][idle] = 1000 * statistics.median(times[wire])
            for call in calls.values():
                call.cancel()
            return medians

    return asyncio.run(run())


def run_both(exchanges: int, experiments: str) -> dict[str, dict[str, float]]:
    """Return what a client process measures with a server process."""
    from specd.identity.authority import Authority, standard_leaves

    environment = {**os.environ, "GRPC_EXPERIMENTS": experiments}
    with tempfile.TemporaryDirectory(prefix="specd-") as name:
        directory = Path(name)
        authority = Authority.create(directory)
        for leaf in standard_leaves(()):
            authority.issue(leaf, days=30, replace=False)
        command = [sys.executable, __file__, "--directory", name, "--exchanges", str(exchanges), "--role"]
        with subprocess.Popen([*command, "server"], env=environment) as server:
            try:
                while not (directory / "addresses").exists() and server.poll() is None:
                    time.sleep(0.05)
                client = subprocess.run([*command, "client"], env=environment, check=True, capture_output=True)
            finally:
                server.terminate()
    measured: dict[str, dict[str, float]] = json.loads(client.stdout)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exchanges", type=int, default=200, help="for each idle time and wire")
    parser.add_argument("--json", type=Path, help="write the medians to this file")
    parser.add_argument("--role", choices=["server", "client"], help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "server":
        serve(arguments.directory)
        return
    if arguments.role == "client":
        print(json.dumps(measure(arguments.directory, arguments.exchanges)))
        return

    results = {}
    for pollers, experiments in POLLERS.items():
        results[pollers] = run_both(arguments.exchanges, experiments)
        print(f"{pollers + ', median ms after idle ms':40}" + "".join(f"{idle:>8}" for idle in IDLE_MILLISECONDS))
        for wire, medians in results[pollers].items():
            print(f"  {wire:38}" + "".join(f"{value:8.2f}" for value in medians.values()))
        _, plain, tls = results[pollers].values()
        costs = [_EXCHANGES_A_ROUND * (tls[idle] - plain[idle]) for idle in plain]
        print(f"  {'TLS costs a round':38}" + "".join(f"{cost:8.2f}" for cost in costs))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The data plane of the ranks: MLX's own collectives."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import tempfile
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from specd.errors import StartupError
from specd.worker.cpu.streams import use_one_stream

# Time for all ranks to connect to each other, once they know each other's addresses.
CONNECT_SECONDS = 30.0


def check_backend(backend: str) -> None:
    """Raise StartupError if MLX has no such backend here, or if it lacks a description of the machines."""
    if not mx.distributed.is_available(backend):
        known = [name for name in ("ring", "jaccl", "nccl") if mx.distributed.is_available(name)]
        raise StartupError(
            f"--ranks-backend is {backend}, which this MLX does not have: choose {' or '.join(known) or 'no ranks'}"
        )
    if backend == "jaccl" and not os.environ.get("MLX_IBV_DEVICES"):
        raise StartupError(
            "--ranks-backend jaccl needs MLX_IBV_DEVICES, the file of the machines' devices that "
            "'mlx.distributed_config' writes"
        )


def free_port(host: str) -> int:
    """Return a port of a host of this machine that no process uses. Another one can take it before it is used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def join_collectives(rank: int, addresses: Sequence[str], backend: str, seconds: float = CONNECT_SECONDS) -> Any:
    """Connect this process to the other ranks, and return their group. The process ends if that takes longer.

    `addresses` are HOST:PORT by rank. Must run on the thread that computes. Raises StartupError.
    """
    use_one_stream()
    host, _, port = addresses[0].rpartition(":")
    variables = {"MLX_RANK": str(rank), "MLX_WORLD_SIZE": str(len(addresses))}
    with contextlib.ExitStack() as files:
        if backend == "ring":
            hosts = files.enter_context(tempfile.NamedTemporaryFile("w", suffix=".json"))
            json.dump([[address] for address in addresses], hosts)
            hosts.flush()
            variables["MLX_HOSTFILE"] = hosts.name
        elif backend == "jaccl":
            variables["MLX_JACCL_COORDINATOR"] = f"{host}:{port}"
        else:
            variables |= {"NCCL_HOST_IP": host, "NCCL_PORT": port}
        os.environ.update(variables)
        # MLX waits without a release of Python's lock, so no thread of Python could end the process.
        faulthandler.dump_traceback_later(seconds, exit=True)
        try:
            group = mx.distributed.init(strict=True, backend=backend)
        except Exception as error:
            raise StartupError(f"cannot connect the ranks at {', '.join(addresses)} by {backend}: {error}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()
    if (group.rank(), group.size()) != (rank, len(addresses)):
        raise StartupError(f"MLX makes this rank {group.rank()} of {group.size()}, not {rank} of {len(addresses)}")
    return group

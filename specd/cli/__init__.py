"""The command `specd`."""

from __future__ import annotations

import os
from collections.abc import Sequence

# gRPC's older pollers wake one thread less on each way of a message than its event engine: 0.4 ms a round, of 2.1, on
# two cores. Chosen for our own processes only, and before anything imports gRPC, which reads it once.
_GRPC_EXPERIMENTS = "-event_engine_client,-event_engine_listener"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, or those of the process."""
    os.environ.setdefault("GRPC_EXPERIMENTS", _GRPC_EXPERIMENTS)
    # transformers renders chat templates here, and misses PyTorch aloud.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

    from specd.cli.app import run_command

    run_command(arguments)

"""The command `specd`."""

from __future__ import annotations

from collections.abc import Sequence

from specd.launch import run_app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, or those of the process."""
    from specd.cli.app import app  # imports gRPC, for which specd.launch has set variables

    run_app(app, arguments, name="specd")

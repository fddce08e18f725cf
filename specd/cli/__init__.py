"""The command `specd`."""

from __future__ import annotations

import signal
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, or those of the process."""
    # Ctrl-C during imports ends the process without a traceback. A command that handles Ctrl-C installs its handler.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    from specd.cli.app import app
    from specd.launch import run_app  # sets variables for gRPC, which the commands import

    run_app(app, arguments, name="specd")

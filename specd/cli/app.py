"""The command line: `specd --help`."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from specd import __version__
from specd.cli import token
from specd.cli.bench import bench
from specd.cli.certs import certs
from specd.cli.chat import chat
from specd.cli.convert import convert
from specd.cli.generate import generate
from specd.cli.health import health
from specd.cli.top import top
from specd.cli.up import demo, up
from specd.launch import PROCESSES, check_servers_are_installed, new_app, settings_options
from specd.settings import UpSettings

app = new_app("specd")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specd {__version__}")
        raise typer.Exit


@app.callback(no_args_is_help=True)
def configure(
    config: Annotated[
        Path | None, typer.Option(help="Settings file, TOML. [SPECD_CONFIG] (default: specd.toml if there is one)")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error. [SPECD_LOG_LEVEL] (default: info)")
    ] = None,
    log_format: Annotated[
        str | None,
        typer.Option(help="pretty, json, or auto: pretty on a terminal. [SPECD_LOG_FORMAT] (default: auto)"),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Speculative decoding as a gRPC service on MLX.

    Every option can also be set by the variable in brackets, or in the settings file, in the table of its command.
    """
    # Set in the environment, which the processes of `up`, `demo` and `bench` inherit.
    for variable, value in (("CONFIG", config), ("LOG_LEVEL", log_level), ("LOG_FORMAT", log_format)):
        if value is not None:
            os.environ[f"SPECD_{variable}"] = str(value)


def _start(process: str) -> Callable[[typer.Context], None]:
    """Return the command of a process: it runs the package, which parses the arguments."""

    def command(context: typer.Context) -> None:
        check_servers_are_installed()
        sys.argv[1:] = context.args
        runpy.run_module(process.replace("-", "_"), run_name="__main__", alter_sys=True)

    return command


_PASS_ARGUMENTS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

for process, summary in PROCESSES.items():
    app.command(process, help=summary, add_help_option=False, context_settings=_PASS_ARGUMENTS_ON)(_start(process))
app.command()(settings_options(UpSettings)(up))
for command in (generate, chat, top, health, demo, bench, convert, certs):
    app.command()(command)
app.add_typer(token.app)

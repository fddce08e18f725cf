"""The command line: `specd --help`."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from specd.cli.variables import misspelt_variables
from specd.launch import PROCESSES, check_servers_are_installed, new_app

# The module of each command, and its help. It is imported when it runs, because gRPC and settings take half a second.
COMMANDS = {
    **{name: ("", summary) for name, summary in PROCESSES.items()},
    "up": (
        "specd.cli.up",
        "Start the workers, the coordinator and, with --http, the gateway; restart processes that end; Ctrl-C stops.",
    ),
    "generate": ("specd.cli.generate", "Stream a completion from a running coordinator."),
    "chat": ("specd.cli.chat", "Talk with a chat model."),
    "top": ("specd.cli.top", "Watch a coordinator: sessions, tokens/s, acceptance, where a round's time goes."),
    "health": ("specd.cli.health", "Print the health of a process; exit with 1 unless it is SERVING."),
    "demo": ("specd.cli.demo", "Start everything on an embedded pair, stream a completion, print statistics and stop."),
    "bench": ("specd.cli.bench", "Compare specd with its target alone and with mlx-lm, on the same prompts."),
    "models": ("specd.cli.models.commands", "List, show, download and remove models on this machine."),
    "pair": (
        "specd.cli.pairs.commands",
        "Show which models here can draft for a target, and how fast each pair is.",
    ),
    "convert": ("specd.cli.convert", "Write a model in another precision, or quantised, as safetensors."),
    "certs": (
        "specd.cli.certs",
        "Make a private authority and its certificates for the processes, a client and Prometheus.",
    ),
    "token": ("specd.cli.token", "Make, list and revoke clients' tokens; a running coordinator reads the changes."),
    "shell-completion": ("specd.cli.shell_completion", "Print a script that completes specd's commands in a shell."),
}
EXIT_CODES = (
    "Exit codes: 0: success. 1: a call or a check failed. 2: the usage or a setting is wrong, or a process cannot "
    "start."
)


class _Commands(TyperGroup):
    """The commands. Each is imported when it is used."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # for their names: see get_command

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        if cmd_name not in COMMANDS:
            return None
        module, summary = COMMANDS[cmd_name]
        if not module:
            return typer.main.get_command(_process(cmd_name, summary))
        imported = import_module(module)
        if cmd_name != "up" and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # it has a handler of its own
            signal.signal(signal.SIGINT, signal.default_int_handler)
        group = getattr(imported, "app", None)
        if group is None:
            group = new_app(cmd_name)
            group.command(epilog=EXIT_CODES)(getattr(imported, cmd_name.replace("-", "_")))
        return typer.main.get_command(group)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            from pydantic import ValidationError

            from specd.wrong_value import wrong_argument

            if isinstance(error.__cause__, ValidationError):  # its own words leave out the value and the range
                limits = (getattr(error.param, limit, None) for limit in ("min", "max"))
                error.message = wrong_argument(error.__cause__, *limits)
            raise

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


app = new_app("specd", cls=_Commands)


def _show_version(wanted: bool) -> None:
    if wanted:
        from specd.version import __version__

        typer.echo(f"specd {__version__}")
        raise typer.Exit


@app.callback(no_args_is_help=True, epilog=EXIT_CODES)
def configure(
    config: Annotated[
        Path | None, typer.Option(help="Settings file, TOML. [SPECD_CONFIG] (default: specd.toml if there is one)")
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(
            help="debug, info, warning or error. [SPECD_LOG_LEVEL] (default: info; for up on a terminal: warning)"
        ),
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
    if "SPECD_SUPERVISOR_FD" not in os.environ:  # the supervisor has printed the warning already
        for name, meant in misspelt_variables().items():
            typer.echo(f"specd: warning: specd has no variable {name}: did you mean {meant}?", err=True)


def _process(name: str, summary: str) -> typer.Typer:
    """Return the command of a process: it runs the package, which parses the arguments."""
    process = new_app(name)
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}

    @process.command(help=summary, add_help_option=False, context_settings=settings)
    def run(context: typer.Context) -> None:
        check_servers_are_installed()
        sys.argv[1:] = context.args
        runpy.run_module(name.replace("-", "_"), run_name="__main__", alter_sys=True)

    return process

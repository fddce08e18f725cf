"""The common part of `specd PROCESS` and `python -m PACKAGE`: variables, options, logging, errors at start-up.

Import it before anything that imports gRPC.
"""

from __future__ import annotations

import os

# gRPC's older pollers wake one thread less on each way of a message than its event engine: 0.4 ms a round, of 2.1, on
# two cores. Chosen for our own processes only. gRPC reads the variable once, when it is imported.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
# gRPC's core logs each TLS handshake that fails, so a stranger who reaches the port could fill the disk.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# transformers renders chat templates here, and warns when there is no PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

import asyncio
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, get_args

import typer
from typer.core import TyperGroup

from specd.startup_error import StartupError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from specd.settings import Settings, SettingsT

# Help text of each process. The package of a process has the same name, with underscores.
PROCESSES = {
    "draft-worker": "Serve a draft model.",
    "target-worker": "Serve a target model.",
    "coordinator": "Serve clients, with a target worker and a draft worker.",
    "gateway": "Serve OpenAI's HTTP API, with a coordinator.",
}

_METAVARS: dict[Any, str] = {int: "INT", float: "FLOAT"}


def new_app(name: str, *, cls: type[TyperGroup] | None = None) -> typer.Typer:
    """Return a command line without commands, or with those of the given class of groups."""
    return typer.Typer(
        name=name,
        cls=cls,
        add_completion=False,
        rich_markup_mode=None,  # the panels cut off variable names that are longer than their last column
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def run_app(app: typer.Typer, arguments: Sequence[str] | None = None, *, name: str | None = None) -> None:
    """Run a command line on these arguments, by default those of the process.

    A StartupError becomes one line on standard error, and exit code 2.
    """
    from specd.supervised import tell_supervisor

    try:
        app(args=arguments, prog_name=name)
    except StartupError as error:
        if not tell_supervisor(failure=str(error)):  # the supervisor prints it as its last line
            complain(str(error))
        sys.exit(2)
    except Exception as error:  # a fault of ours: the traceback is for the log
        tell_supervisor(failure=f"{type(error).__name__}: {error}")
        raise


def launch(process: str, cls: type[SettingsT], *checks: Callable[[SettingsT], None]) -> None:
    """Parse the settings of a process from its arguments, check them, and run its package's `main.run`.

    The addresses and the `checks` come before the import of `main`, which takes a second, or three with MLX.
    """
    app = new_app(process)

    @app.command(help=PROCESSES[process])
    @settings_options(cls)
    def command(settings: SettingsT) -> None:
        _check_addresses(settings)
        for check in checks:
            check(settings)
        start_logging(process)
        asyncio.run(import_module(f"{process.replace('-', '_')}.main").run(settings))

    run_app(app, name=f"specd {process}")


def _check_addresses(settings: Any) -> None:
    """Raise StartupError if a process cannot listen at its addresses."""
    from specd.listening import hold, hold_for_metrics

    if getattr(settings, "follow", ""):  # a follower has no address
        return
    with hold(settings.listen), hold_for_metrics(getattr(settings, "metrics_listen", "")):  # the gateway has one port
        pass


def check_servers_are_installed() -> None:
    """Raise StartupError if specd was installed without what its servers need."""
    if importlib.util.find_spec("grpc_reflection") is None:  # only the servers depend on it
        raise StartupError("this command needs specd's servers, which are not installed: pip install 'specd[serve]'")


def start_logging(process: str) -> None:
    """Configure logging from the settings."""
    from specd.logs import configure_logging
    from specd.settings import LogSettings, load_settings

    configure_logging(load_settings(LogSettings, {}), process=process)


def complain(message: str) -> None:
    """Write an error for people, in one line."""
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print("[bold red]specd:[/]", end=" ")
    console.print(" ".join(message.split()), markup=False)  # libraries' messages can have several lines


def settings_options(cls: type[SettingsT]) -> Callable[[Callable[[SettingsT], None]], Callable[..., None]]:
    """Return a decorator for a command that takes a `cls`: it gets an option for each field.

    The options override environment and file.
    """

    from specd.settings import load_settings

    def decorate(command: Callable[[SettingsT], None]) -> Callable[..., None]:
        def run(**options: Any) -> None:
            command(load_settings(cls, {name: value for name, value in options.items() if value is not None}))

        parameters = [_option(cls, name, field) for name, field in cls.model_fields.items()]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _option(cls: type[Settings], name: str, field: FieldInfo) -> inspect.Parameter:
    # All but switches are read as text, so that pydantic checks them like variables and the file.
    kind = bool if field.annotation is bool else str
    flag = f"--{name.replace('_', '-')}"
    declaration = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    variable = cls.variable_of(name)
    choices = f" One of {', '.join(map(str, get_args(field.annotation)))}." if get_args(field.annotation) else ""
    default = _shown(field.default)
    option = typer.Option(
        declaration,
        help=f"{field.description}{choices} [{variable}] (default: {default})",
        show_default=False,
        metavar=None if kind is bool else _METAVARS.get(field.annotation, "TEXT"),
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Optional[kind], option],  # noqa: UP045
    )


def _shown(default: object) -> str:
    if default == "":
        return "none"
    # For the embedded models, which lie deep in the installation, the name is enough.
    return Path(default).name if isinstance(default, str) and Path(default).is_dir() else str(default)

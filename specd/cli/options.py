"""Turns a settings class into command line options, so that each setting is defined once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Optional, TypeVar, get_args

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import SettingsError

from specd.errors import StartupError
from specd.settings import Settings

SettingsT = TypeVar("SettingsT", bound=Settings)

_METAVARS: dict[Any, str] = {int: "INT", float: "FLOAT"}


def settings_options(cls: type[SettingsT]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, whose first parameter is a `cls`, an option for each of its fields.

    The options override environment and file, and are checked together with them.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command).parameters.values())[1:]

        def run(**arguments: Any) -> None:
            flags = {name: arguments.pop(name) for name in cls.model_fields}
            command(
                load_settings(cls, {name: value for name, value in flags.items() if value is not None}), **arguments
            )

        options = [_option(cls, name, field) for name, field in cls.model_fields.items()]
        run.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def load_settings(cls: type[SettingsT], flags: dict[str, Any]) -> SettingsT:
    """Read the settings of a command. Raises StartupError, which names each wrong one with its value."""
    try:
        return cls(**flags)
    except ValidationError as error:
        problems = "; ".join(
            f"{p['loc'][0]}: {p['msg'].removeprefix('Value error, ')} (got {p['input']!r})" for p in error.errors()
        )
        raise StartupError(f"wrong settings: {problems}") from error
    except SettingsError as error:
        raise StartupError(f"wrong settings: {error}") from error


def _option(cls: type[Settings], name: str, field: FieldInfo) -> inspect.Parameter:
    # Anything but a switch is read as text and checked with the variables and the file, for the same message.
    kind = bool if field.annotation is bool else str
    flag = f"--{name.replace('_', '-')}"
    declaration = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    variable = f"{cls.model_config.get('env_prefix', '')}{name}".upper()
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
    # The embedded models lie deep in the installation: their names say more than the paths.
    return Path(default).name if isinstance(default, str) and Path(default).is_dir() else str(default)

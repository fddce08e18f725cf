"""The settings file, TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from specd.startup_error import StartupError


@cache
def read_settings_file(path: str, tables: tuple[str, ...], values: frozenset[str]) -> dict[str, Any]:
    """Return the content of a settings file with these tables, and these values outside them.

    Without a path, it is specd.toml, if there is one. Raises StartupError.
    """
    file = Path(path or "specd.toml")
    if not path and not file.is_file():
        return {}
    try:
        content = tomllib.loads(file.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read the settings file {file}: {error}") from error
    known = {*tables, *values}
    if unknown := sorted(set(content) - known):
        entries = ", ".join(f"{name!r}{suggestion(name, known)}" for name in unknown)
        raise StartupError(f"the settings file {file} has unknown entries: {entries}")
    for name in {*tables} & set(content):
        if not isinstance(content[name], dict):
            raise StartupError(
                f"in the settings file {file}, {name} is {content[name]!r}: it must be a table, [{name}]"
            )
    return content


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the known name that it resembles, or ""."""
    close = get_close_matches(name, [*known], 1, 0.75)
    return f": did you mean {close[0]!r}?" if close else ""

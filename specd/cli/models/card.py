"""The licence of a model, from the front matter of its card or from its LICENSE file."""

from __future__ import annotations

import re
from pathlib import Path

from specd.cli.models.places import printable

_MOST_BYTES = 64 * 1024  # read of a card: a longer front matter has results of benchmarks behind the licence
_FRONT_MATTER = re.compile(r"\A---[ \t]*\r?\n(.*?)^---", re.DOTALL | re.MULTILINE)
# `license: mit`, `license: [mit]`, or a list below it. A parser of YAML would take a second for the longest cards.
_LICENCE = re.compile(r"^license:[ \t]*(?:\r?\n[ \t]*-[ \t]*|\[)?([^\s\[\],][^\r\n\],]*)", re.MULTILINE)
_NAME = re.compile(r"^license_name:[ \t]*([^\r\n]+)", re.MULTILINE)
_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "LICENCE.txt")
_LONGEST = 60


def licence_of(directory: Path) -> str | None:
    """Return the licence of the model in a directory; None if its files do not tell it."""
    if matter := _FRONT_MATTER.match(_beginning(directory / "README.md")):
        found = _LICENCE.search(matter[1])
        named = _NAME.search(matter[1])
        if found and found[1].strip(" '\"") == "other" and named:
            found = named
        if found and (text := printable(found[1].split(" #")[0].strip(" '\""), _LONGEST)):
            return text
    for name in _FILES:
        lines = _beginning(directory / name).splitlines()
        if first := next((printable(line.strip(" #*="), _LONGEST) for line in lines if line.strip(" #*=")), ""):
            return first
    return None


def _beginning(path: Path) -> str:
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""

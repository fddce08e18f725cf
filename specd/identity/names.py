"""Names of clients, in tokens and in the certificates that specd makes."""

from __future__ import annotations

import re

from specd.startup_error import StartupError


def is_name(name: str) -> bool:
    """Return whether a client can have this name, which appears in logs, metadata and file names."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", name) is not None


def check_name(name: str) -> None:
    """Raise StartupError unless a client can have this name."""
    if not is_name(name):
        raise StartupError(f"a client's name is {name!r}: use up to 64 letters, digits, '.', '_', '@' and '-'")

"""Names of clients, in tokens and in the certificates that specd makes."""

from __future__ import annotations

import re

from specd.startup_error import StartupError


def is_name(name: str) -> bool:
    """Say whether a client can have this name: it goes into logs, metadata and names of files."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", name) is not None


def check_name(name: str) -> None:
    """Raise StartupError unless a client can have this name."""
    if not is_name(name):
        raise StartupError(f"{name!r} is no name for a client: use up to 64 letters, digits, '.', '_', '@' and '-'")

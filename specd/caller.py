"""The client that sent a request: its name, and its limits."""

from __future__ import annotations

import re
from dataclasses import dataclass

from specd.startup_error import StartupError


@dataclass(frozen=True)
class CallerLimits:
    """Limits of one client; None means that only the limits for all clients hold.

    `max_sessions` may run at once. `tokens_per_minute` counts prompts and generated tokens. One request may generate
    `max_tokens`.
    """

    max_sessions: int | None = None
    tokens_per_minute: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class Caller:
    """A client, by the name of its token or certificate. Without either, all clients share the name ""."""

    name: str
    limits: CallerLimits = CallerLimits()


def is_name(name: str) -> bool:
    """Return whether a client can have this name, which appears in logs, metadata and file names."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", name) is not None


def check_name(name: str) -> None:
    """Raise StartupError unless a client can have this name."""
    if not is_name(name):
        raise StartupError(f"a client's name is {name!r}: use up to 64 letters, digits, '.', '_', '@' and '-'")

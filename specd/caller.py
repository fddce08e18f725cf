"""The client that sent a request, and its limits."""

from __future__ import annotations

from dataclasses import dataclass


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

"""The client that a request is from, and what it may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallerLimits:
    """What one client may use at a time; None is no limit of its own, beside those that hold for everyone.

    `max_sessions` run at once, `tokens_per_minute` are prompt and generated ones, `max_tokens` those that one request
    may generate.
    """

    max_sessions: int | None = None
    tokens_per_minute: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class Caller:
    """A client, by the name of its token or certificate. Where neither is asked for, all are the one named ""."""

    name: str
    limits: CallerLimits = CallerLimits()

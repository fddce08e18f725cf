"""The error of a process that cannot start, in a module without gRPC, which the other errors import."""

from __future__ import annotations


class StartupError(Exception):
    """The process cannot start; the message has the reason and the remedy."""

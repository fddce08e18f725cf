"""The error of a process that cannot start. It is apart from the others, which need gRPC."""

from __future__ import annotations


class StartupError(Exception):
    """The process cannot start; the message says why and what to do about it."""

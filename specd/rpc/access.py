"""Who makes the call that runs now."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeAlias

import grpc

from specd.caller import Caller

# Returns who makes a call of this method. Raises UnauthenticatedError or PermissionDeniedError.
Identify: TypeAlias = "Callable[[str, grpc.aio.ServicerContext[Any, Any]], Caller]"

_ANYONE = Caller()
_caller: ContextVar[Caller] = ContextVar("caller", default=_ANYONE)


def current_caller() -> Caller:
    """Return who makes the call that this task serves; outside of calls, the client without a name."""
    return _caller.get()


def serve_caller(caller: Caller) -> None:
    """Say who makes the call that this task serves. gRPC serves each call in a task of its own."""
    _caller.set(caller)


def anyone(method: str, context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
    """Let everyone call everything, as the client without a name."""
    return _ANYONE

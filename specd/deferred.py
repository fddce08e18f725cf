"""A value that a server has only some time after it began to listen."""

from __future__ import annotations

from typing import Generic, TypeVar

from specd.errors import UnavailableError

Value = TypeVar("Value")


class Deferred(Generic[Value]):
    """What a service needs to answer, set once it is there.

    Servers listen before the model is loaded or the workers have come, so that health checks get an answer.
    """

    def __init__(self, waiting_for: str) -> None:
        """Name what is waited for, for the error."""
        self._waiting_for = waiting_for
        self._value: Value | None = None

    def set(self, value: Value) -> None:
        """Set the value."""
        self._value = value

    def get(self) -> Value:
        """Return the value. Raises UnavailableError until it is set."""
        if self._value is None:
            raise UnavailableError("STARTING", f"still waiting for {self._waiting_for}", retry_after_seconds=1.0)
        return self._value

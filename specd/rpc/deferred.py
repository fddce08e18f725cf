"""A value that is set after the server has started."""

from __future__ import annotations

from typing import Generic, TypeVar

from specd.errors import UnavailableError

Value = TypeVar("Value")


class Deferred(Generic[Value]):
    """A dependency of a service that is set later.

    Servers listen before the model is loaded or the workers are connected, so that health checks are answered.
    """

    def __init__(self, waiting_for: str) -> None:
        """Name the dependency for the error message."""
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

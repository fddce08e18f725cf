"""Errors of workers."""

from __future__ import annotations


class WorkerError(Exception):
    """A worker did not answer a request; `reason` is for programs, the message for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class WorkerLostError(WorkerError):
    """The stream broke: the worker died, restarted, or no longer holds the session. A new stream can help."""


class WorkerFullError(WorkerError):
    """The worker has no room for the session now, and has ended its stream."""


class WorkerLateError(WorkerError):
    """The worker did not answer in time. The stream is still open, and the worker may still compute."""


class RefusedModelError(Exception):
    """A worker holds a model that the coordinator cannot use; the message has the model and the reason."""

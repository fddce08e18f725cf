"""Errors reported to callers, each with a gRPC status code and a reason for programs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import ClassVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from specd.startup_error import StartupError as StartupError  # noqa: PLC0414 - modules without gRPC import it there

DOMAIN = "specd"
# The name of the trailing metadata in which gRPC carries the details of a status.
STATUS_DETAILS = "grpc-status-details-bin"

# A message can quote a request of any length, and gRPC fails on a status longer than a few KiB.
_MOST_CHARACTERS = 1000


class SpecdError(Exception):
    """An error whose message is reported to the caller as it is.

    `reason` and `metadata` become a google.rpc.ErrorInfo, `retry_after_seconds` a google.rpc.RetryInfo. Where the
    message quotes a client's text, `for_log` is the message without the quotation. `session_id` names the session that
    the error ended, if there was one. An error that gRPC or a proxy reported is not `is_from_specd`, and its `reason`
    is the name of the status.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        for_log: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after_seconds: float = 0.0,
    ) -> None:
        super().__init__(_cut(message))
        self.for_log = _cut(for_log or message)
        self.session_id = ""
        self.is_from_specd = True
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.retry_after_seconds = retry_after_seconds


class InvalidRequestError(SpecdError):
    """The request can never succeed as it is."""

    code = grpc.StatusCode.INVALID_ARGUMENT


def about(field: str, value: object, limit: object) -> dict[str, str]:
    """Return the metadata of an error about a field: its value, or the number of its entries, and what is allowed."""
    return {"field": field, "value": str(value), "limit": str(limit)}


class UnauthenticatedError(SpecdError):
    """The caller has given no credentials, or invalid ones."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDeniedError(SpecdError):
    """The caller is known, but may not call this method."""

    code = grpc.StatusCode.PERMISSION_DENIED


class CacheTooShortError(SpecdError):
    """A request to a worker starts at a position that the worker's cache does not reach."""

    code = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, position: int, cached_len: int) -> None:
        super().__init__(
            "CACHE_TOO_SHORT",
            f"position is {position}, but the cache holds {cached_len} tokens: send the tokens from {cached_len} on",
            metadata={"cached_len": str(cached_len)},
        )


class CannotResumeError(SpecdError):
    """A generation cannot be resumed, because its model or its prompt has changed."""

    code = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, message: str) -> None:
        super().__init__("CANNOT_RESUME", message)


class NotFoundError(SpecdError):
    """The request names something that does not exist, or no longer exists."""

    code = grpc.StatusCode.NOT_FOUND


class ConflictError(SpecdError):
    """The request conflicts with another request, and can succeed after that one has ended."""

    code = grpc.StatusCode.ABORTED


class ResourceExhaustedError(SpecdError):
    """There is no room for the request now; a later retry can succeed."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class ClientStalledError(SpecdError):
    """The client has not read for too long; its session has ended."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED

    def __init__(self, stall_seconds: float) -> None:
        super().__init__(
            "CLIENT_STALLED",
            f"the client has read no message for {stall_seconds:g} s, so its session has ended: read the "
            "stream without long pauses",
        )


class UnavailableError(SpecdError):
    """Something that the request needs is unavailable; a later retry can succeed."""

    code = grpc.StatusCode.UNAVAILABLE


class InternalError(SpecdError):
    """specd failed; the session ends, and no other request would help."""


def to_status(error: SpecdError) -> grpc.Status:
    """Return the status of an error, for `context.abort_with_status`."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    details = [_packed(info)]
    if error.retry_after_seconds > 0:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_seconds * 1e9))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    code = getattr(code_pb2, error.code.name)
    return rpc_status.to_status(status_pb2.Status(code=code, message=str(error), details=details))


def error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    """Return the ErrorInfo of a status, or an empty one."""
    info = error_details_pb2.ErrorInfo()
    with contextlib.suppress(ValueError, DecodeError):  # the details are broken, or belong to another status
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
        for detail in status.details if status is not None else ():
            if detail.Unpack(info):
                return info
    return error_details_pb2.ErrorInfo()


def _cut(message: str) -> str:
    return message if len(message) <= _MOST_CHARACTERS else f"{message[:_MOST_CHARACTERS]} …"


def _packed(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed

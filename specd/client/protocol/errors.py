"""Errors of calls, as the server's own classes."""

from __future__ import annotations

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from specd.errors import (
    DOMAIN,
    CannotResumeError,
    ConflictError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    SpecdError,
    UnauthenticatedError,
    UnavailableError,
)
from specd.protocol import ProtocolMismatchError

_CLASSES: dict[grpc.StatusCode, type[SpecdError]] = {
    kind.code: kind
    for kind in (
        ConflictError,
        InternalError,
        InvalidRequestError,
        NotFoundError,
        PermissionDeniedError,
        ResourceExhaustedError,
        UnauthenticatedError,
        UnavailableError,
    )
}


class CallError(SpecdError):
    """A call ended with a status that none of specd's own errors has, such as DEADLINE_EXCEEDED."""

    def __init__(self, reason: str, message: str, status: grpc.StatusCode) -> None:
        super().__init__(reason, message)
        self.status = status


def client_closed() -> CallError:
    """Return the error of what a client was asked for before or after it was closed."""
    return CallError("CLIENT_CLOSED", "the client was closed: make another one", grpc.StatusCode.CANCELLED)


def error_from(error: grpc.RpcError, address: str) -> SpecdError:
    """Return the error that a call ended with. Its `reason` is specd's own, or else the name of the status."""
    call: grpc.Call = error  # type: ignore[assignment]  # what gRPC raises is both
    status, details = call.code(), call.details() or ""
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    rich = rpc_status.from_call(call)
    for detail in rich.details if rich is not None else ():
        if not detail.Unpack(retry):
            detail.Unpack(info)
    is_from_specd = info.domain == DOMAIN
    reason = info.reason if is_from_specd else status.name
    if reason == "UNAVAILABLE":
        details = f"{address} does not answer: {details}"
    if reason == "CANNOT_RESUME":
        return CannotResumeError(details)
    if reason == "PROTOCOL_MISMATCH":
        return ProtocolMismatchError(details)
    known: SpecdError
    if status in _CLASSES:
        seconds = retry.retry_delay.ToNanoseconds() / 1e9
        known = _CLASSES[status](reason, details, metadata=info.metadata, retry_after_seconds=seconds)
    else:
        known = CallError(reason, details, status)
    known.is_from_specd = is_from_specd
    return known

"""Errors in the form that the clients of a path read: OpenAI's, or Anthropic's on /v1/messages."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from gateway.http.errors import ApiError
from gateway.http.event_stream import data, named

MESSAGES = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropics(scope: Scope) -> bool:
    """Return whether clients of Anthropic's API ask for this path."""
    path: str = scope["path"]
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def body_of(error: ApiError, scope: Scope) -> dict[str, Any]:
    """Return the body of an error's response."""
    if not is_anthropics(scope):
        return error.body
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = str(error)
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # by these words Claude Code knows that it has to shorten it
    shown = {"type": "error", "error": {"type": kind, "message": message}}
    return {**shown, "request_id": scope["request_id"]} if "request_id" in scope else shown


def event_of(error: ApiError, scope: Scope) -> bytes:
    """Return the event of an error that ends a stream."""
    body = body_of(error, scope)
    return named(body) if is_anthropics(scope) else data(body)

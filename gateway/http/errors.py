"""Errors in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """An error that its client gets as `{"error": {...}}`, with an HTTP status.

    `code` is for programs, `param` names the invalid field, and `retry_after_seconds` is the time after which a retry
    can help; 0 if it cannot.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_seconds: float = 0.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_seconds = retry_after_seconds
        self._headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        error = {"message": str(self), "type": _type_of(self.status), "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """Its headers about retries, as OpenAI's clients read them."""
        if self.retry_after_seconds <= 0:
            again = {"x-should-retry": "false"} if self.status >= 500 else {}  # these clients retry without it
            return {**again, **self._headers}
        milliseconds = max(round(self.retry_after_seconds * 1000), 1)
        seconds = -(-milliseconds // 1000)
        return {"retry-after": str(seconds), "retry-after-ms": str(milliseconds), **self._headers}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return the error of a request that can never succeed as it is."""
    return ApiError(400, code, message, param=param)


def _type_of(status: int) -> str:
    match status:
        case 401:
            return "authentication_error"
        case 403:
            return "permission_error"
        case 429:
            return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"

"""Whole responses in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json
from starlette.types import Scope, Send

from gateway.http.error_forms import body_of
from gateway.http.errors import ApiError


async def send_json(
    value: Mapping[str, Any], send: Send, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    """Send a JSON object."""
    body = to_json(value)
    all_headers = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    raw = [(name.encode(), text.encode()) for name, text in all_headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


async def send_error(error: ApiError, scope: Scope, send: Send) -> None:
    """Send an error to the client of a request."""
    await send_json(body_of(error, scope), send, status=error.status, headers=error.headers)

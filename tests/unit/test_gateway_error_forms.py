"""Errors and keys on the paths of Anthropic's clients."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import ErrorResponse
from prometheus_client import CollectorRegistry
from pydantic import TypeAdapter
from starlette.requests import Request

from gateway.app import make_app
from gateway.http.endpoint import caller_of
from gateway.http.error_forms import body_of, event_of
from gateway.http.errors import ApiError
from gateway.service import Service
from specd.client import AsyncClient
from specd.gateway_settings import GatewaySettings
from specd.settings import load_settings

ANTHROPICS: dict[str, Any] = {"type": "http", "path": "/v1/messages", "request_id": "r1"}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (409, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_errors_have_the_form_of_the_path(status: int, kind: str) -> None:
    error = ApiError(status, "code", "a message")
    expected = {"type": "error", "error": {"type": kind, "message": "a message"}, "request_id": "r1"}
    assert body_of(error, ANTHROPICS) == expected
    if kind != "request_too_large":  # for which anthropic has no type
        TypeAdapter(ErrorResponse).validate_python(expected, strict=True)
    name, shown, _ = event_of(error, ANTHROPICS).decode().split("\n", 2)
    assert name == "event: error"
    assert json.loads(shown.removeprefix("data: ")) == expected
    for path in ("/v1/responses", "/v1/messagesx"):
        assert body_of(error, {"path": path}) == error.body
        assert event_of(error, {"path": path}).startswith(b'data: {"error"')


def test_a_prompt_that_is_too_long_is_known_by_the_words_of_anthropic() -> None:
    shown = body_of(ApiError(400, "context_length_exceeded", "the prompt has 9 tokens"), ANTHROPICS)
    assert shown["error"]["message"] == "prompt is too long: the prompt has 9 tokens"


class Exchange:
    """One request to an application with a coordinator that is not there."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> dict[str, Any]:
        raw = [
            (b"host", b"127.0.0.1"),
            *((name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()),
        ]
        scope: dict[str, Any] = {
            **{"type": "http", "method": method, "path": path, "query_string": b"", "scheme": "http"},
            **{"headers": raw, "server": ("127.0.0.1", 80)},
        }

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            self.sent.append(message)

        async with AsyncClient("127.0.0.1:1") as coordinator:
            service = Service(coordinator, load_settings(GatewaySettings, {}))
            await make_app(service, CollectorRegistry())(scope, receive, send)
        shown: dict[str, Any] = json.loads(self.sent[1]["body"])
        return shown


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "kind"),
    [
        ("POST", "/v1/messages", b"{", {}, 400, "invalid_request_error"),
        ("POST", "/v1/messages/count_tokens", b"{}", {}, 400, "invalid_request_error"),
        ("POST", "/v1/messages", b"{}", {"content_type": "text/plain"}, 415, "invalid_request_error"),
        ("POST", "/v1/messages", b"{}", {"content_length": "99999999"}, 413, "request_too_large"),
        ("POST", "/v1/messages", b"{}", {"x_api_key": "x" * 5000}, 401, "authentication_error"),
        ("POST", "/v1/messages", b"{}", {"origin": "http://evil.example"}, 403, "permission_error"),
        ("GET", "/v1/messages", b"", {}, 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", b"{}", {}, 404, "not_found_error"),
    ],
)
async def test_each_refusal_before_an_answer_has_the_form(
    method: str, path: str, body: bytes, headers: dict[str, str], status: int, kind: str
) -> None:
    exchange = Exchange()
    shown = await exchange.ask(method, path, body, **headers)
    assert exchange.sent[0]["status"] == status
    assert shown["type"] == "error"
    assert shown["error"]["type"] == kind
    assert dict(exchange.sent[0]["headers"])[b"request-id"].decode() == shown["request_id"]


@pytest.mark.parametrize(
    ("path", "headers", "token"),
    [
        ("/v1/messages", {"x-api-key": "key"}, "key"),
        ("/v1/messages/count_tokens", {"x-api-key": "key"}, "key"),
        ("/v1/messages", {"x-api-key": "key", "authorization": "Bearer token"}, "token"),
        ("/v1/messages", {"x-api-key": "ké"}, ""),
        ("/v1/responses", {"x-api-key": "key"}, ""),
    ],
)
def test_a_key_is_a_token_on_the_paths_of_anthropic(path: str, headers: dict[str, str], token: str) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    assert caller_of(Request({"type": "http", "path": path, "headers": raw})).token == token

"""An endpoint: one request from its body to the last byte of its answer."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from gateway.http.answer import Answer
from gateway.http.error_forms import event_of, is_anthropics
from gateway.http.errors import ApiError, invalid
from gateway.http.event_stream import send_events
from gateway.http.json_body import parse_object, read_body
from gateway.http.long_bodies import beside_loop
from gateway.http.responses import send_error, send_json
from gateway.metrics import GatewayMetrics

log = structlog.get_logger()

# Of nginx: the client closed the request. It is in metrics only.
_CLIENT_GONE = "499"
# In metrics only: the client did not want to wait for its model, so the gateway has not failed.
_LOADING = "503 model_loading"

# gRPC's metadata has 8 KiB for both, and refuses more as if there were too many requests.
_MOST_TOKEN_CHARACTERS = 4096
REFUSE_UNLOADED = "x-specd-refuse-unloaded"
_TRACEPARENT = re.compile(r"[!-~]{1,256}", re.ASCII)


@dataclass(frozen=True)
class Requester:
    """Who asks: the token of the client, and the trace that its request is part of; empty if it sent none.

    With `refuses_unloaded`, it wants no answer of a model that has to be loaded first.
    """

    token: str = ""
    traceparent: str = ""
    refuses_unloaded: bool = False


Handler = Callable[[Mapping[str, Any], Requester], Awaitable[Answer]]


class _ClientGoneError(Exception):
    """The client has closed the connection."""


class Endpoint:
    """An ASGI application for one path: reads a JSON body if there is to be one, and sends what its handler answers.

    A client that goes away cancels what is done for it.
    """

    def __init__(self, name: str, handler: Handler, metrics: GatewayMetrics, *, max_body_bytes: int = 0) -> None:
        """Name the endpoint for metrics; without `max_body_bytes` a request is what its path says."""
        self._name = name
        self._handler = handler
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        began_at = time.perf_counter()
        status = "500"
        sent = _Sent(send)
        self._metrics.open_requests.inc()
        try:
            await self._answer(Request(scope, receive), sent)
            status = str(sent.status)
        except (ClientDisconnect, _ClientGoneError):  # during the upload, or after it
            status = _CLIENT_GONE
        except ApiError as error:
            status = _LOADING if error.code == "model_loading" else str(error.status)
            await send_error(error, scope, sent)
        except Exception:
            # Without what was asked: that is the client's.
            log.exception("request failed", endpoint=self._name, request_id=scope.get("request_id"))
            if not sent.status:
                failure = ApiError(500, "internal_error", "the gateway failed on this request")
                await send_error(failure, scope, sent)
        finally:
            self._metrics.open_requests.dec()
            self._metrics.count(self._name, status, time.perf_counter() - began_at)

    async def _answer(self, request: Request, send: _Sent) -> None:
        body: Mapping[str, Any] = request.path_params
        if self._max_body_bytes:
            body = await beside_loop(parse_object, await read_body(request, self._max_body_bytes))
        async with _ending_with_client(request):
            answer = await self._handler(body, caller_of(request))
            if answer.events is not None:
                try:
                    await send_events(
                        answer.events,
                        send,
                        lambda: answer.headers,
                        partial(event_of, scope=request.scope),
                        answer.notice,
                    )
                finally:
                    await answer.events.aclose()
            else:
                await send_json(answer.json or {}, send, headers=answer.headers)


class _Sent:
    """`send` of ASGI, which remembers the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


def caller_of(request: Request) -> Requester:
    """Return who asks, by the headers. Raises ApiError for a token that is longer than any, or a wrong switch."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    token = token.strip()
    if not token and is_anthropics(request.scope):
        scheme, token = "bearer", request.headers.get("x-api-key", "").strip()
    # What no gRPC metadata can carry is no token of the coordinator's.
    if scheme.lower() != "bearer" or not (token.isascii() and token.isprintable()):
        token = ""
    if len(token) > _MOST_TOKEN_CHARACTERS:
        raise ApiError(
            401,
            "invalid_api_key",
            f"the token has {len(token)} characters: one of the coordinator has at most {_MOST_TOKEN_CHARACTERS}",
        )
    traceparent = request.headers.get("traceparent", "")
    return Requester(
        token,
        traceparent if _TRACEPARENT.fullmatch(traceparent) else "",
        _switch(request, REFUSE_UNLOADED),
    )


def _switch(request: Request, name: str) -> bool:
    """Return whether a header switches something on. Raises ApiError for another value than 0 and 1."""
    value = request.headers.get(name, "0").strip()
    if value not in {"0", "1"}:
        raise invalid(f"the header {name} is {value[:100]!r}: send 1, or leave it out")
    return value == "1"


@asynccontextmanager
async def _ending_with_client(request: Request) -> AsyncIterator[None]:
    """Run a block that is cancelled when the client goes away. Raises _ClientGoneError then."""
    task = asyncio.current_task()
    assert task is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not is_gone:
            raise
        task.uncancel()
        raise _ClientGoneError from None
    finally:
        watching.cancel()

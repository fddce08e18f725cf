"""The HTTP application: which path leads where."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from gateway.chat.endpoint import complete_chat
from gateway.completions.endpoint import complete
from gateway.http.answer import Answer
from gateway.http.endpoint import REFUSE_UNLOADED, Endpoint, Requester, caller_of
from gateway.http.error_forms import MESSAGES, body_of
from gateway.http.errors import ApiError
from gateway.http.guards import Guards
from gateway.messages.endpoint import answer_message, count_tokens
from gateway.metrics import GatewayMetrics
from gateway.model_list import list_models, refuse_embeddings, show_model
from gateway.openapi import openapi_document
from gateway.page import page_routes
from gateway.responses.endpoint import respond
from gateway.service import Service
from gateway.tokenizing import detokenize, tokenize

_HEALTH_SECONDS = 2.0

_Answering = Callable[[Service, Mapping[str, Any], Requester], Awaitable[Answer]]


def make_app(service: Service, registry: CollectorRegistry) -> Starlette:
    """Return the application."""
    metrics = GatewayMetrics(registry)
    settings = service.settings

    def post(path: str, name: str, answer: _Answering) -> Route:
        endpoint = Endpoint(name, partial(answer, service), metrics, max_body_bytes=settings.max_body_bytes)
        return Route(path, endpoint, methods=["POST"], name=name)

    def get(path: str, name: str, answer: _Answering) -> Route:
        return Route(path, Endpoint(name, partial(answer, service), metrics), methods=["GET"], name=name)

    health = get("/health", "health", check_health)
    openapi = Route("/openapi.json", show_openapi, methods=["GET"])
    page = page_routes()
    routes: list[BaseRoute] = [
        post("/v1/chat/completions", "chat_completions", complete_chat),
        post("/v1/completions", "completions", complete),
        post("/v1/responses", "responses", respond),
        post(MESSAGES, "messages", answer_message),
        post(f"{MESSAGES}/count_tokens", "count_tokens", count_tokens),
        post("/v1/embeddings", "embeddings", refuse_embeddings),
        post("/tokenize", "tokenize", tokenize),
        post("/detokenize", "detokenize", detokenize),
        get("/v1/models", "models", list_models),
        get("/v1/models/{name:path}", "model", show_model),
        health,
        Route("/metrics", partial(show_metrics, service, registry), methods=["GET"]),
        openapi,
        *page,
    ]
    guards = Middleware(
        Guards,
        hosts=settings.host_names,
        origins=settings.origins,
        asks_for_certificates=bool(settings.tls_ca),
        open_paths=[route.path for route in (health, openapi, *page)],
    )
    cors = Middleware(
        CORSMiddleware,
        allow_origins=settings.origins,
        allow_methods=["GET", "POST"],
        allow_headers=[
            "authorization",
            "content-type",
            "x-api-key",
            "anthropic-version",
            "anthropic-beta",
            REFUSE_UNLOADED,
        ],
    )
    return Starlette(
        routes=routes,
        middleware=[guards, cors] if settings.origins else [guards],
        exception_handlers={HTTPException: show_http_error},
    )


async def check_health(service: Service, _: Mapping[str, Any], __: Requester) -> Answer:
    """Say that a request could be answered. Raises ApiError if it could not."""
    if not await service.client.is_serving(timeout_seconds=_HEALTH_SECONDS):
        raise ApiError(503, "not_serving", "the coordinator does not serve now", retry_after_seconds=1.0)
    return Answer(json={"status": "ok"})


async def show_metrics(service: Service, registry: CollectorRegistry, request: Request) -> Response:
    """Return the metrics in Prometheus's text format, where clients have tokens to those only."""
    if service.settings.asks_for_tokens:
        try:
            await service.models.check(caller_of(request))
        except ApiError as error:
            return JSONResponse(body_of(error, request.scope), status_code=error.status)
    return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})


async def show_openapi(_: Request) -> Response:
    """Return the OpenAPI document."""
    return JSONResponse(openapi_document())


async def show_http_error(request: Request, error: Exception) -> Response:
    """Return the error of a path or a method that is not there."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    headers = dict(error.headers or {})
    allowed = sorted(headers.get("Allow", "").split(", "))
    what = f"the method is not allowed: use {' or '.join(allowed)}" if error.status_code == 405 else error.detail
    shown = ApiError(error.status_code, code, f"{request.method} {request.url.path[:200]}: {what}")
    return JSONResponse(body_of(shown, request.scope), status_code=error.status_code, headers=headers)

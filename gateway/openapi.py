"""The OpenAPI document of the gateway, from the models that check requests."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.chat.request import ChatFields
from gateway.completions.request import CompletionFields
from gateway.http.endpoint import REFUSE_UNLOADED
from gateway.http.error_forms import is_anthropics
from gateway.messages.request import CountFields, MessageFields
from gateway.responses.request import ResponseFields
from gateway.tokenizing import DetokenizeFields, TokenizeFields
from specd.version import __version__

_REF = "#/components/schemas/{model}"
_POSTS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("/v1/chat/completions", "Complete a conversation.", ChatFields),
    ("/v1/completions", "Complete texts.", CompletionFields),
    ("/v1/responses", "Answer, in items.", ResponseFields),
    ("/v1/messages", "Answer, as Anthropic does.", MessageFields),
    ("/v1/messages/count_tokens", "Count the tokens of a message's prompt.", CountFields),
    ("/tokenize", "Return the tokens of a text or a conversation.", TokenizeFields),
    ("/detokenize", "Return the text of tokens.", DetokenizeFields),
)
_GETS = (
    ("/v1/models", "List the served models.", ""),
    ("/v1/models/{name}", "Describe a model.", "name"),
    ("/health", "Report whether a request could be answered now.", ""),
    ("/metrics", "Metrics in Prometheus's text format.", ""),
)
_TEXT = {"type": "string"}
_HEADERS = [
    {
        "name": REFUSE_UNLOADED,
        "in": "header",
        "description": "With 1, a request for a model that is not loaded gets 503 instead of waiting for it.",
        "schema": {"enum": ["0", "1"]},
    }
]
_MESSAGE_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {"type": "object", "required": ["type", "message"], "properties": {"type": _TEXT, "message": _TEXT}},
        "request_id": _TEXT,
    },
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@cache
def openapi_document() -> dict[str, Any]:
    """Return the document."""
    _, schemas = models_json_schema([(cls, "validation") for _, _, cls in _POSTS], ref_template=_REF)
    components = {**schemas["$defs"], "Error": _ERROR, "MessageError": _MESSAGE_ERROR}
    paths: dict[str, Any] = {path: {"post": _post(path, summary, cls)} for path, summary, cls in _POSTS}
    paths |= {path: {"get": _get(summary, parameter)} for path, summary, parameter in _GETS}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "specd",
            "version": __version__,
            "description": "Speculative decoding, OpenAI's and Anthropic's APIs.",
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }


def _post(path: str, summary: str, cls: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": _REF.format(model=cls.__name__)}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    whole = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}}
    error = "MessageError" if is_anthropics({"path": path}) else "Error"
    responses = _responses("The answer, or its events.", whole, error=error)
    return {"summary": summary, "parameters": _HEADERS, "requestBody": body, "responses": responses}


def _get(summary: str, parameter: str) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": summary, "responses": _responses(summary, {})}
    if parameter:
        schema = {"type": "string"}
        described["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": schema}]
    return described


def _responses(description: str, content: dict[str, Any], *, error: str = "Error") -> dict[str, Any]:
    failed = {
        "description": "An error.",
        "content": {"application/json": {"schema": {"$ref": _REF.format(model=error)}}},
    }
    return {"200": {"description": description, **({"content": content} if content else {})}, "default": failed}

"""The coordinator's errors in the words of HTTP: its fields and endpoints where the coordinator names those of gRPC."""

from __future__ import annotations

import re

import grpc

from gateway.http.errors import ApiError
from specd.client.protocol.errors import CallError
from specd.errors import SpecdError

# The fields of gRPC that HTTP has under another name. A test compares them with the protocol.
NAMES = {
    "top_log_probabilities": "logprobs",
    "template_arguments": "chat_template_kwargs",
    "template_arguments_json": "chat_template_kwargs",
    "stop.token_ids": "stop_token_ids",
    "stop.strings": "stop",
    "stop.ignore_eos": "ignore_eos",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat.tools_json": "tools",
    "prediction_text": "prediction",
    "prediction_token_ids": "prediction",
    "token_ids": "prompt",
}
# What the coordinator says to do, where that is something else over HTTP.
_SENTENCES = {
    "send the prompt as `text` or `token_ids`": "use /v1/completions with `prompt`",
    "set `text` or `token_ids`": "use /v1/completions with `prompt`",
    "set `text`, `token_ids` or `chat`": "set `prompt`",
    "leave the prompt out": "leave `prompt` empty",
    "began with chat, and the request has text or token_ids: use the same": (
        "is a conversation, and the request a completion: use /v1/chat/completions or /v1/responses"
    ),
    "began with text or token_ids, and the request has chat: use the same": (
        "is a completion, and the request a conversation: use /v1/completions"
    ),
    " (ListModels)": " (GET /v1/models)",
    "a Generate runs on session": "another request runs on session",
    "set REJECTION": "set 'rejection'",
    "to go on, resume with the tokens so far when it is back, or at another": "send the request again",
    "send one, as the metadata 'authorization: Bearer TOKEN' (specd generate reads it from SPECD_TOKEN)": (
        "send one as the header `Authorization: Bearer TOKEN`"
    ),
}
_SENTENCE = re.compile("|".join(map(re.escape, _SENTENCES)))
_NAME = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, NAMES))})(?!\w)")
_QUOTED_GRAMMAR = re.compile(r"^grammar\.\w+")
_GRAMMAR = re.compile(rf"{_QUOTED_GRAMMAR.pattern}|\b(?:a|the) grammar\b")
_CONSTANT = re.compile(r"\b(draft_source|acceptance) is ([A-Z]+)\b")
_FIELD = re.compile(
    r"(\w+_\w+(?:\.\w+)?|text\.format|temperature|lenience|acceptance|prompt|stop|echo|messages|tools) "
    r"(?:is|has|of|cannot|forbids) "
)
# What a template or its conversation says is not the coordinator's, nor what is quoted of a grammar.
_QUOTING = {"CHAT_TEMPLATE_FAILED", "BAD_GRAMMAR"}
_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
# Without a word of the coordinator's own, an error is gRPC's, whose words can name addresses.
_WORDS = {
    401: "the coordinator wants a token: send it as `Authorization: Bearer TOKEN`",
    403: "this token does not allow that",
    429: "the coordinator takes no more requests now",
    503: "the coordinator cannot be reached",
    504: "the coordinator did not answer in time",
}
# Clients look for these.
_CODES = {"CONTEXT_EXCEEDED": "context_length_exceeded", "UNAUTHENTICATED": "invalid_api_key"}
_RETRY_SECONDS = 1.0
# The same code says that a message is too long and that there are too many requests; only the latter can be retried.
_TOO_LONG = "SERVER: Received message larger than max"  # gRPC's core


def to_api_error(error: SpecdError, *, max_tokens: str = "max_tokens", grammar: str = "") -> ApiError:
    """Return the error that a client gets for one of the coordinator's, with its names for `max_tokens`, `grammar`."""
    status = error.status if isinstance(error, CallError) else error.code
    code = _STATUSES.get(status, 500)
    if error.reason == "MESSAGE_TOO_LARGE" or (not error.is_from_specd and str(error).startswith(_TOO_LONG)):
        return ApiError(413, "body_too_large", "the request is longer than the coordinator's --max-request-bytes")
    message = _WORDS.get(code, "the coordinator failed on this request")
    if error.is_from_specd:
        message = in_http_words(error.reason, str(error), max_tokens=max_tokens, grammar=grammar)
    retry_after_seconds = error.retry_after_seconds
    if code in {429, 503} and not retry_after_seconds:
        retry_after_seconds = _RETRY_SECONDS
    return ApiError(
        code,
        _CODES.get(error.reason, error.reason.lower()),
        message,
        param=field_of(message) if code == 400 else None,
        retry_after_seconds=retry_after_seconds,
    )


def in_http_words(reason: str, message: str, *, max_tokens: str = "max_tokens", grammar: str = "") -> str:
    """Return the message of an error, with the names that the request has for `max_tokens` and `grammar`."""
    if reason in _QUOTING:
        return _QUOTED_GRAMMAR.sub(grammar, message)
    message = _SENTENCE.sub(lambda found: _SENTENCES[found[0]], message)
    if grammar:
        message = _GRAMMAR.sub(grammar, message)
    message = _NAME.sub(lambda found: NAMES[found[0]], message)
    message = re.sub(r"\bmax_tokens\b", max_tokens, message)
    return _CONSTANT.sub(lambda found: f"{found[1]} is '{found[2].lower()}'", message)


def field_of(message: str) -> str | None:
    """Return the field that a message in these words begins with, as in `min_tokens is 5: …`; None if with none."""
    found = _FIELD.match(message)
    return found[1] if found is not None else None

"""Bodies of requests: JSON of bounded size and depth, without duplicate keys."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from starlette.requests import Request

from gateway.http.errors import ApiError, invalid

# What a google.protobuf.Struct can carry: each level of JSON is three of its messages, of which a parser reads 100.
MAX_DEPTH = 32

_READ_SECONDS = 30.0  # for a whole body
_LONG_BYTES = 1 << 16  # parsed on a thread, so that other requests do not wait

_STRINGS_AND_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{\]}]', re.DOTALL)

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """Return the object that is the body of a request. Raises ApiError, and starlette's ClientDisconnect."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "unsupported_media_type", f"the content-type is {kind[:100]!r}: send application/json")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "unsupported_media_type", "the body has a content-encoding: send it plain")
    body = await _read(request, max_bytes)
    if len(body) < _LONG_BYTES:
        return parse_object(body)
    return await asyncio.to_thread(parse_object, body)


async def _read(request: Request, max_bytes: int) -> bytes:
    too_long = ApiError(413, "body_too_large", f"the body is longer than {max_bytes} bytes, which is the most")
    if int(request.headers.get("content-length", "0")) > max_bytes:  # a number, by the HTTP parser
        raise too_long
    chunks = bytearray()
    try:
        async with asyncio.timeout(_READ_SECONDS):
            async for chunk in request.stream():
                chunks += chunk
                if len(chunks) > max_bytes:
                    raise too_long
    except TimeoutError:
        raise ApiError(408, "body_timeout", f"the body did not come within {_READ_SECONDS:g} s") from None
    return bytes(chunks)


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. Raises ApiError."""
    _check_depth(body)
    try:
        value = json.loads(body, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise invalid("the body is not UTF-8", code="invalid_json") from error
    except ValueError as error:  # among them numbers with too many digits
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise invalid("the body is not a JSON object", code="invalid_json")
    if _SURROGATE.search(body) and _has_surrogates(value):
        raise invalid("the body has half of a surrogate pair, which is no character", code="invalid_json")
    return value


def _check_depth(body: bytes) -> None:
    """Refuse a body that nests deeper than the parser, and what comes after it, can follow."""
    depth = 0
    for match in _STRINGS_AND_BRACKETS.finditer(body):
        first = body[match.start()]
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise invalid(f"the body nests deeper than {MAX_DEPTH} levels, which is the most", code="invalid_json")
        elif first in b"]}":
            depth -= 1


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise invalid(f"the body has the key {twice[:100]!r} twice: which one counts is not said", code="invalid_json")
    return values


def _refuse_constant(name: str) -> None:
    raise invalid(f"the body has {name}, which is not JSON", code="invalid_json")


def _has_surrogates(value: dict[str, Any]) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False

"""Bodies of requests: JSON of bounded size, depth and number of values, without duplicate keys."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request

from gateway.http.errors import ApiError, invalid
from gateway.http.long_bodies import note_length
from specd.json_text import InvalidJsonError, Room, TooLargeJsonError, parse_json

MAX_DEPTH = 32
# Room for the numbers of a long prompt of token ids, and for the strings, arrays and objects of 4,096 messages.
MAX_VALUES = 2**18
MAX_PARTS = 2**16

_READ_SECONDS = 30.0  # for a whole body

TOO_MANY_VALUES = "too_many_values"


def new_room() -> Room:
    """Return the room that a body has for values."""
    return Room(values=MAX_VALUES, parts=MAX_PARTS, depth=MAX_DEPTH)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body of a request. Its length decides whether `beside_loop` uses a thread.

    Raises ApiError, and starlette's ClientDisconnect.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "unsupported_media_type", f"the content-type is {kind[:100]!r}: send application/json")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "unsupported_media_type", "the body has a content-encoding: send it plain")
    too_long = ApiError(413, "body_too_large", f"the body is longer than {max_bytes} bytes: send less")
    if int(request.headers.get("content-length", "0")) > max_bytes:  # the HTTP parser accepts only numbers
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
    note_length(len(chunks))
    return bytes(chunks)


def parse_object(body: bytes, room: Room | None = None) -> dict[str, Any]:
    """Return the JSON object in a body, or in a part of one, which takes its values from `room`. Raises ApiError."""
    if not body.strip():
        raise invalid("the body is empty: send a JSON object", code="invalid_json")
    try:
        value = parse_json(body, new_room() if room is None else room)
    except InvalidJsonError as error:
        raise invalid(f"the body {error}", code="invalid_json") from error
    except TooLargeJsonError as error:
        raise invalid(f"the body {error}", code=TOO_MANY_VALUES) from error
    if not isinstance(value, dict):
        raise invalid("the body is not a JSON object", code="invalid_json")
    return value

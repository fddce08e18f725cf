"""Bodies of requests: JSON of bounded size, depth and number of values, without duplicate keys."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any

import jiter
from starlette.requests import Request

from gateway.http.errors import ApiError, invalid
from gateway.http.long_bodies import note_length

# What a google.protobuf.Struct can carry: each level of JSON is three of its messages, of which a parser reads 100.
MAX_DEPTH = 32
# Python takes 40 bytes and more for a value of two bytes, so these bound the memory of a body: the numbers of a long
# prompt of token ids, and the strings, arrays and objects of 4,096 messages.
MAX_VALUES = 2**18
MAX_PARTS = 2**16

_READ_SECONDS = 30.0  # for a whole body

_COMMA, _QUOTE = b',"'
TOO_MANY_VALUES = "too_many_values"

_OUTSIDE = re.compile(rb'[",\[{\]}]')
# A piece of a string: one search through all of a string of escapes would keep the interpreter from other threads.
_INSIDE = re.compile(rb'(?:[^"\\]++|\\.){1,16384}+', re.DOTALL)


@dataclass
class Room:
    """How many values may still be read: numbers and the like, and strings, arrays and objects."""

    values: int = MAX_VALUES
    parts: int = MAX_PARTS


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body of a request, whose length decides where `beside_loop` works on it.

    Raises ApiError, and starlette's ClientDisconnect.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "unsupported_media_type", f"the content-type is {kind[:100]!r}: send application/json")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "unsupported_media_type", "the body has a content-encoding: send it plain")
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
    note_length(len(chunks))
    return bytes(chunks)


def parse_object(body: bytes, room: Room | None = None) -> dict[str, Any]:
    """Return the JSON object in a body, or in a part of one, which takes its values from `room`. Raises ApiError."""
    _check_values(body, Room() if room is None else room)
    try:
        value = jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True, cache_mode=False)
    except ValueError as error:  # among them numbers with too many digits, and halves of surrogate pairs
        shown = str(error)
        shown = shown if len(shown) <= 200 else f"{shown[:100]}…{shown[-60:]}"  # a key of any length, and the place
        raise invalid(f"the body is not JSON: {shown}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise invalid("the body is not a JSON object", code="invalid_json")
    return value


def _check_values(body: bytes, room: Room) -> None:
    """Refuse a body that nests deeper, or has more in it, than what comes after it can follow."""
    at = depth = 0
    while (found := _OUTSIDE.search(body, at)) is not None:
        at = found.end()
        mark = body[at - 1]
        if mark == _COMMA:
            room.values -= 1
        elif mark in b"]}":
            depth -= 1
        else:
            room.parts -= 1
            if mark == _QUOTE:
                while (piece := _INSIDE.match(body, at)) is not None:
                    at = piece.end()
                at += 1
            else:
                depth += 1
        if depth > MAX_DEPTH:
            raise invalid(f"the body nests deeper than {MAX_DEPTH} levels, which is the most", code="invalid_json")
        if room.values <= 0:
            raise invalid(f"the body has more than {MAX_VALUES} values, which is the most", code=TOO_MANY_VALUES)
        if room.parts < 0:
            most = f"the body has more than {MAX_PARTS} strings, arrays and objects, which is the most"
            raise invalid(most, code=TOO_MANY_VALUES)

"""JSON of clients: its keys keep their order, its whole numbers all their digits, and `2.0` stays a float."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import dataclass
from typing import Any

_COMMA, _QUOTE = b',"'
_OUTSIDE = re.compile(rb'[",\[{\]}]')
# A piece of a string: one search through all of a string of escapes would keep the interpreter from other threads.
_INSIDE = re.compile(rb'(?:[^"\\]++|\\.){1,16384}+', re.DOTALL)


class InvalidJsonError(ValueError):
    """A text is not JSON, has a key twice, has a number that no double holds, or nests too deep."""


class TooLargeJsonError(ValueError):
    """A text has more values than there is room for."""


@dataclass
class Room:
    """Room for values that may still be read: numbers and the like, and strings, arrays and objects.

    Python takes 40 bytes and more for a value of two bytes, so these bound the memory of what is read.
    """

    values: int
    parts: int
    depth: int

    def __post_init__(self) -> None:
        self._most_values, self._most_parts = self.values, self.parts

    def take(self, text: bytes) -> None:
        """Count what a text has. Raises InvalidJsonError if it nests too deep, and TooLargeJsonError.

        It reads no more than marks, and the parser judges the rest. It takes time by the length of the text.
        """
        at = depth = 0
        while (found := _OUTSIDE.search(text, at)) is not None:
            at = found.end()
            mark = text[at - 1]
            if mark == _COMMA:
                self.values -= 1
            elif mark in b"]}":
                depth -= 1
            else:
                self.parts -= 1
                if mark == _QUOTE:
                    while (piece := _INSIDE.match(text, at)) is not None:
                        at = piece.end()
                    at += 1
                else:
                    depth += 1
            if depth > self.depth:
                raise InvalidJsonError(f"nests deeper than {self.depth} levels, which is the most")
            if self.values <= 0:
                raise TooLargeJsonError(f"has more than {self._most_values} values, which is the most")
            if self.parts < 0:
                most = f"has more than {self._most_parts} strings, arrays and objects, which is the most"
                raise TooLargeJsonError(most)


def parse_json(text: bytes, room: Room) -> Any:
    """Return the value of a JSON text, which takes its values from `room`.

    The messages of InvalidJsonError and TooLargeJsonError are predicates: the caller puts the name of the text first.
    """
    import jiter  # late: clients that only write JSON do without it

    room.take(text)
    try:
        value = jiter.from_json(text, allow_inf_nan=False, catch_duplicate_keys=True, cache_mode=False)
    except ValueError as error:  # among them numbers with too many digits, and halves of surrogate pairs
        shown = str(error)
        shown = shown if len(shown) <= 200 else f"{shown[:100]}…{shown[-60:]}"  # a key of any length, and the place
        raise InvalidJsonError(f"is not JSON: {shown}") from error
    if (found := _beyond_doubles(value)) is not None:
        raise InvalidJsonError(f"has a number that is beyond a double ({found}): a number must be under 1.8e308")
    return value


def to_json(value: Any) -> str:
    """Return the JSON text of a value. Raises ValueError or TypeError for what JSON does not have, such as NaN."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _beyond_doubles(value: Any) -> str | None:
    """Return a number that no double holds, and the member that has it; None if doubles hold all numbers.

    Long whole numbers are slow to write: the time is quadratic.
    """
    members = value.items() if isinstance(value, dict) else (("", value),)
    for name, member in members:
        values = [member]
        while values:
            each = values.pop()
            if isinstance(each, dict):
                values.extend(each.values())
            elif isinstance(each, list):
                values.extend(each)
            elif isinstance(each, float) and not math.isfinite(each):
                return f"{each:g} in {name[:100]!r}" if name else f"{each:g}"
            elif isinstance(each, int) and each.bit_length() > sys.float_info.max_exp:
                return f"{each.bit_length()} bits in {name[:100]!r}" if name else f"{each.bit_length()} bits"
    return None

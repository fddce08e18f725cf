"""The number of values in a serialised message, without parsing it: a parsed message takes far more memory."""

from __future__ import annotations

from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from specd.errors import InvalidRequestError

# Limits for the fields of a message and its submessages (each value of a Struct is two to four fields), and for the
# items of packed arrays.
MAX_FIELDS = 2**18
MAX_ITEMS = 2**20

_MAX_DEPTH = 100  # of messages in messages: the parser refuses more
_PIECE_BYTES = 1 << 16
_FIXED = {1: 8, 5: 4}  # bytes, by the kind of a field
_NOT_LAST = bytes(range(128, 256))  # of the bytes of a number
_FIXED_BYTES = {
    **dict.fromkeys((FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64), 8),
    **dict.fromkeys((FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32), 4),
}


class TooManyValuesError(InvalidRequestError):
    """A message has more values than a request may have."""

    def __init__(self, method: str, what: str, most: int) -> None:
        super().__init__("OUT_OF_RANGE", f"the request to {method} has more than {most} {what}: send fewer")


def check_values(method: str, message: Descriptor, data: bytes) -> None:
    """Raise TooManyValuesError for more values than a request may have. The parser reports broken messages."""
    at, end, num_fields, num_items = 0, len(data), 0, 0
    messages, items = _kinds(message)
    outer: list[tuple[dict[int, Descriptor], dict[int, int], int]] = []
    while True:
        while at >= end:
            if not outer:
                return
            messages, items, end = outer.pop()
        num_fields += 1
        if num_fields > MAX_FIELDS:
            raise TooManyValuesError(method, "fields", MAX_FIELDS)
        try:
            key, at = _number(data, at) if data[at] > 127 else (data[at], at + 1)
            if key & 7 != 2:
                at = _number(data, at)[1] if key & 7 == 0 else at + _FIXED[key & 7]
                continue
            length, at = _number(data, at) if data[at] > 127 else (data[at], at + 1)
        except (IndexError, KeyError):  # cut off, or a group
            return
        if length > end - at or len(outer) > _MAX_DEPTH:
            return
        if length and (part := messages.get(key >> 3)) is not None:
            outer.append((messages, items, end))
            messages, items = _kinds(part)
            end = at + length
            continue
        if (item_bytes := items.get(key >> 3)) is not None:
            num_items += length // item_bytes if item_bytes else _count_numbers(data, at, at + length)
            if num_items > MAX_ITEMS:
                raise TooManyValuesError(method, "items in arrays", MAX_ITEMS)
        at += length


@cache
def _kinds(message: Descriptor) -> tuple[dict[int, Descriptor], dict[int, int]]:
    """Return the messages in a message, and the bytes that an item of each packed array takes, 0 if that varies."""
    messages = {field.number: field.message_type for field in message.fields if field.message_type is not None}
    items = {
        field.number: _FIXED_BYTES.get(field.type, 0)
        for field in message.fields
        if field.is_repeated and field.message_type is None and field.cpp_type != FieldDescriptor.CPPTYPE_STRING
    }
    return messages, items


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place, and the place after it. Raises IndexError."""
    number = data[at] & 127
    shift = 7
    while data[at] > 127:
        at += 1
        number |= (data[at] & 127) << shift
        shift += 7
        if shift > 70:
            raise IndexError
    return number, at + 1


def _count_numbers(data: bytes, at: int, end: int) -> int:
    """Return the number of numbers. It counts piece by piece, so that other threads wait for one piece only."""
    pieces = range(at, end, _PIECE_BYTES)
    return sum(len(data[i : min(i + _PIECE_BYTES, end)].translate(None, _NOT_LAST)) for i in pieces)

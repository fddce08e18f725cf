"""The values of a message are counted before it is parsed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specd.rpc.message_values import MAX_FIELDS, MAX_ITEMS, TooManyValuesError, check_values
from specd.v1.generation_pb2 import Chat, ChatMessage, GenerateRequest, TokenIds
from specd.v1.sampling_pb2 import SamplingParameters
from specd.v1.target_pb2 import VerifyRequest
from tests.security.hostile_shapes import GRPC_SHAPES, SPECIAL_SHAPES, UNREAD_SHAPES, WRITTEN_SHAPES

REQUEST: Any = GenerateRequest.DESCRIPTOR
VERIFY: Any = VerifyRequest.DESCRIPTOR


def check(message: GenerateRequest) -> None:
    check_values("/a/B", REQUEST, message.SerializeToString())


@pytest.mark.parametrize("field", ["messages", "tools"])
def test_messages_are_counted_to_the_limit(field: str) -> None:
    # The conversation is a field, and each empty message another.
    parts: list[dict[str, str]] = [{}] * (MAX_FIELDS - 1)
    check(GenerateRequest(chat=Chat(**{field: parts})))  # type: ignore[arg-type]
    with pytest.raises(TooManyValuesError, match=f"more than {MAX_FIELDS} fields"):
        check(GenerateRequest(chat=Chat(**{field: [*parts, {}]})))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [1, 2**32 - 1])
def test_packed_numbers_are_counted_to_the_limit(value: int) -> None:
    check(GenerateRequest(token_ids=TokenIds(ids=[value] * MAX_ITEMS)))
    with pytest.raises(TooManyValuesError, match=f"more than {MAX_ITEMS} items"):
        check(GenerateRequest(token_ids=TokenIds(ids=[value] * (MAX_ITEMS + 1))))


def test_long_text_is_one_value() -> None:
    check(GenerateRequest(text="\x08\x01" * 2**21))
    check(GenerateRequest(chat=Chat(messages=[ChatMessage(role="user", content="\x0a\x00" * 2**21)])))
    check(GenerateRequest(text="x", sampling=SamplingParameters(logit_bias={1: 1.0}, seed=2**64 - 1)))


@given(st.binary(max_size=200))
def test_what_is_broken_is_left_to_the_parser(data: bytes) -> None:
    for message in (REQUEST, VERIFY):
        check_values("/a/B", message, data)


@pytest.mark.parametrize("shape", GRPC_SHAPES)
def test_of_the_hostile_shapes_long_texts_and_the_deep_one_are_left_to_others(shape: str) -> None:
    texts = {*WRITTEN_SHAPES, *SPECIAL_SHAPES, *UNREAD_SHAPES, "a string of quotes", "one line", "special tokens"}
    texts.add("a role of control characters")
    if shape in {*texts, "a deep array"}:
        check_values("/a/B", REQUEST, GRPC_SHAPES[shape])
        return
    with pytest.raises(TooManyValuesError):
        check_values("/a/B", REQUEST, GRPC_SHAPES[shape])

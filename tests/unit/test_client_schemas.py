"""Values of texts that keep a schema, as the Python client gives them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from specd.client import Completion, CompletionToken
from specd.client.protocol.wire import to_request
from specd.client.schema import Schema
from specd.vocabulary import FinishReason, TokenSource


class Point(BaseModel):
    """A class with fields that are not in the order of the alphabet."""

    y: int
    x: int


STATISTICS: Any = None


def completion(text: str, schema: Schema | None, *, specials: tuple[int, ...] = (), **fields: Any) -> Completion:
    """Return a completion that ends with an end token, with other special tokens at these places of its text."""
    tokens = [CompletionToken(9, "", TokenSource.TARGET, special_position=place) for place in (*specials, len(text))]
    given = {"finish_reason": FinishReason.EOS, "session_id": "", "seed": 0, **fields}
    return Completion(text, tokens, statistics=STATISTICS, schema=schema, **given)


def test_a_schema_keeps_the_order_of_its_keys() -> None:
    schema = {"type": "object", "properties": {"z": {"const": 2.0}, "a": {"const": "ü"}}}
    sent = to_request("x", {"schema": schema}).grammar.json_schema
    assert sent == '{"type":"object","properties":{"z":{"const":2.0},"a":{"const":"ü"}}}'
    assert to_request("x", {"schema": " {} "}).grammar.json_schema == " {} "
    assert list(json.loads(to_request("x", {"schema": Point}).grammar.json_schema)["properties"]) == ["y", "x"]
    assert not to_request("x", {"schema": None, "grammar": None}).HasField("grammar")


def test_a_value_is_that_of_the_text() -> None:
    assert completion('{"y": 1, "x": 2}', Point).parsed == Point(y=1, x=2)
    assert completion('{"y": 1, "x": 2}', {}).parsed == {"y": 1, "x": 2}
    assert completion("null", "{}").parsed is None
    assert completion("text", None).parsed is None
    with pytest.raises(ValidationError):
        _ = completion("{}", Point).parsed


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP_STRING, FinishReason.STOP_TOKEN])
def test_a_text_that_something_else_ended_is_no_value(reason: FinishReason) -> None:
    with pytest.raises(ValueError, match=f"ended by {reason.value} after 1 tokens"):
        _ = completion("12", {}, finish_reason=reason).parsed


@pytest.mark.parametrize(
    ("text", "specials"),
    [
        ("Why? {1}</think>\n7", ()),
        ("<think>Why?</think>7", ()),
        ("Why? 6 7", (7,)),  # a marker that is a special token is not in the text
        ("Why?</s>7", (0, 4)),
        ("7", ()),
    ],
)
def test_a_value_is_behind_the_reasoning(text: str, specials: tuple[int, ...]) -> None:
    end = "</s>" if "</s>" in text else "</think>"
    assert completion(text, {}, specials=specials, reasoning_end=end).parsed == 7


def test_a_marker_in_a_value_is_no_reasoning() -> None:
    assert completion('"</think>7"', {}, reasoning_end="</think>").parsed == "</think>7"
    assert completion('Why?</think>"</think>7"', {}, reasoning_end="</think>").parsed == "</think>7"

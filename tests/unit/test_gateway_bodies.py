"""Bodies of HTTP requests: what is refused before anything is done with it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.chat.request import ChatFields
from gateway.completions.request import CompletionFields
from gateway.fields import Defaults, validated
from gateway.http.errors import ApiError
from gateway.http.json_body import MAX_DEPTH, parse_object
from gateway.responses.request import ResponseFields

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(), values, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4))
def test_an_object_is_read_as_it_is(value: dict[str, Any]) -> None:
    assert parse_object(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a": 1, "a": 2}', 'duplicate key "a"'),
        (b'{"b": {"a": 1, "a": 1}}', 'duplicate key "a"'),
        (b'{"a": NaN}', "not JSON"),
        (b'{"a": -Infinity}', "not JSON"),
        (b'{"a": "\xff"}', "unicode"),
        (b'{"a": "\\ud800"}', "hex escape"),
        (b'{"\\udc00": 1}', "surrogate"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"a": ' + b"[" * 100_000, "nests deeper"),
        (b'{"a": ' + b'{"a":' * 100_000, "nests deeper"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_what_is_no_sound_object_is_refused(body: bytes, word: str) -> None:
    with pytest.raises(ApiError, match=word) as raised:
        parse_object(body)
    assert raised.value.status == 400
    assert len(str(raised.value)) < 500


def test_brackets_in_strings_are_no_depth() -> None:
    assert parse_object(b'{"a": "' + b"[" * 1000 + b'\\"["}')["a"].endswith('"[')
    nested = b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1)
    assert parse_object(b'{"a": ' + nested + b', "b": ' + nested + b"}")


def test_a_surrogate_pair_is_a_character() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "\N{GRINNING FACE}"}


DEFAULTS = Defaults(max_tokens=10)
MESSAGES = [{"role": "user", "content": "x"}]


@given(st.dictionaries(st.sampled_from(sorted(ChatFields.model_fields)), JSON_VALUES))
def test_fields_of_any_kind_are_taken_or_named(fields: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, **fields}
    try:
        taken = validated(ChatFields, body)
    except ApiError as error:
        assert error.status == 400
        assert error.param is not None
        assert error.param.split(".")[0].split("[")[0] in fields
    else:
        try:
            taken.chat_generation(1, DEFAULTS)
        except ApiError as error:
            assert error.param in fields or str(error.param).startswith("messages")


@pytest.mark.parametrize("name", ["temperature", "seed", "n", "stop", "tools", "logit_bias", "stream", "prediction"])
def test_null_is_the_same_as_nothing(name: str) -> None:
    given_null = validated(ChatFields, {"messages": MESSAGES, name: None})
    assert given_null.chat_generation(1, DEFAULTS) == validated(ChatFields, {"messages": MESSAGES}).chat_generation(
        1, DEFAULTS
    )


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**64 - 1, 0])
def test_each_seed_of_openai_is_one(seed: int) -> None:
    assert validated(ChatFields, {"messages": MESSAGES, "seed": seed}).seed == seed


@pytest.mark.parametrize(
    "penalties",
    [{"repetition_penalty": 1.3}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.3, "frequency_penalty": 1e-6}],
    ids=["repetition", "presence", "two"],
)
def test_each_penalty_looks_at_the_whole_text_by_itself(penalties: dict[str, float]) -> None:
    fields = validated(ChatFields, {"messages": MESSAGES, **penalties})
    assert fields.chat_generation(1, DEFAULTS).penalty_context_size == 0
    fields = validated(ChatFields, {"messages": MESSAGES, **penalties, "penalty_context_size": 20})
    assert fields.chat_generation(1, DEFAULTS).penalty_context_size == 20


@pytest.mark.parametrize(
    ("given", "option", "field", "cuts"),
    [
        (None, False, None, True),
        (7, False, None, False),
        (7, True, None, True),
        (7, False, True, True),
        (7, True, False, False),
        (None, True, False, True),
    ],
)
def test_max_tokens_are_cut_if_the_field_says_so_or_the_option(
    given: int | None, option: bool, field: bool | None, cuts: bool
) -> None:
    defaults = Defaults(max_tokens=10, cut_max_tokens=option)
    body = {"max_tokens": given, "cut_max_tokens": field}
    asked = [
        validated(ChatFields, {"messages": MESSAGES, **body}).chat_generation(1, defaults),
        validated(CompletionFields, {"prompt": "x", **body}).generations(1, defaults)[0],
        validated(
            ResponseFields, {"input": "x", "max_output_tokens": given, "cut_max_tokens": field}
        ).response_generation(1, defaults),
    ]
    assert [generation.cut_max_tokens for generation in asked] == [cuts] * 3
    assert [generation.max_tokens for generation in asked] == [given or 10, given or 16, given or 10]
    assert [generation.is_max_tokens_given for generation in asked] == [given is not None] * 3

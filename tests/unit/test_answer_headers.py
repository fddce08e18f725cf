"""The headers of an answer are valid for every name that a client can give a field."""

from __future__ import annotations

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.http.answer import Answer


@given(st.lists(st.text(max_size=80), max_size=40))
@example([" "])
@example(["x" * 63 + " y"])
@example(["", "a"])
def test_the_names_of_ignored_fields_make_no_invalid_header(names: list[str]) -> None:
    headers = [*Answer(ignored=names).headers.items()]
    h11.Response(status_code=200, headers=headers)


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["user", "tools[2]"], "user, tools[2]"),
        (["a b", " ", "", "c,d", "\n", "é", " e", "f "], "a b"),
        (["x" * 80], "x" * 64),
    ],
)
def test_names_that_a_header_cannot_carry_are_left_out(names: list[str], shown: str) -> None:
    assert Answer(ignored=names).headers["x-specd-ignored-fields"] == shown

"""The output of a session's rounds: in linear time for any tokens."""

from __future__ import annotations

import pytest

from coordinator.core import Commit, Proposal, Round, Verdict
from coordinator.output import Output, prompt_tokens
from tests.unit.growth import growth
from tests.unit.mortal_server import END_TOKEN, byte_tokenizer

TOKENS = pytest.mark.parametrize("token_id", [END_TOKEN, 0xFF, 0xE2, 0x41], ids=["special", "broken", "cut", "text"])
# What is linear grows as its size does, by 16, and what is quadratic by 256.
FACTOR = 16
MOST_GROWTH = 64.0


def round_of(token_id: int) -> Round:
    return Round(Proposal(), Verdict(0, token_id), Commit([token_id], 0, bonus=True), 0.0, 0.0)


def taken(token_id: int, number: int) -> str:
    output, round_ = Output(byte_tokenizer(), [0x41], stop_strings=["never"]), round_of(token_id)
    return "".join(token.text for _ in range(number) for token in output.take(round_)[1])


@TOKENS
def test_taking_rounds_is_linear(token_id: int) -> None:
    assert growth(lambda size: taken(token_id, size), 500, FACTOR) < MOST_GROWTH


@TOKENS
def test_going_on_behind_a_text_is_linear(token_id: int) -> None:
    work = lambda size: Output(byte_tokenizer(), [0x41]).resume([token_id] * size)  # noqa: E731
    assert growth(work, 500, FACTOR) < MOST_GROWTH


@TOKENS
def test_the_echo_of_a_prompt_is_linear(token_id: int) -> None:
    assert growth(lambda size: prompt_tokens(byte_tokenizer(), [token_id] * size), 500, FACTOR) < MOST_GROWTH


@TOKENS
def test_a_prompt_of_any_tokens_begins_in_linear_time(token_id: int) -> None:
    assert growth(lambda size: Output(byte_tokenizer(), [token_id] * size), 20_000, FACTOR) < MOST_GROWTH

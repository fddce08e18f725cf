"""Text streams: whole characters, and in sum the decoding of all tokens."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from specd.settings import EMBEDDED_TARGET
from specd.text.tokenizer import Tokenizer

TOKENIZER_JSON = (Path(EMBEDDED_TARGET) / "tokenizer.json").read_bytes()
TOKENIZER = Tokenizer(TOKENIZER_JSON)
END_OF_TEXT = 0


def stream(prompt_ids: list[int], token_ids: list[int]) -> list[str]:
    text = TOKENIZER.stream_text(prompt_ids)
    return [*(text.push(token_id) for token_id in token_ids), text.finish()]


@given(st.text(max_size=40), st.text(min_size=1, max_size=40))
def test_the_pieces_are_the_text(prompt: str, continuation: str) -> None:
    prompt_ids = TOKENIZER.encode(prompt)
    token_ids = TOKENIZER.encode(continuation)[1:]  # without the token that begins a document
    assert "".join(stream(prompt_ids, token_ids)) == continuation


@given(st.text(st.characters(min_codepoint=0x80, exclude_categories=["Cs"]), min_size=1, max_size=20))
def test_no_piece_ends_inside_a_character(text: str) -> None:
    pieces = stream([END_OF_TEXT], TOKENIZER.encode(text)[1:])
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces if "\N{REPLACEMENT CHARACTER}" not in text)


def test_an_unfinished_character_is_held_back_and_shown_at_the_end() -> None:
    token_ids = TOKENIZER.encode("\N{SNOWMAN}")[1:]
    assert len(token_ids) > 1
    pieces = stream([END_OF_TEXT], token_ids[:-1])
    assert pieces[:-1] == [""] * (len(token_ids) - 1)
    assert pieces[-1] == "\N{REPLACEMENT CHARACTER}"


def test_a_prompt_that_ends_inside_a_character_is_not_repeated() -> None:
    snowman = TOKENIZER.encode("\N{SNOWMAN}")[1:]
    prompt_ids = [*TOKENIZER.encode("name = 'hello "), *snowman[:1]]
    assert stream(prompt_ids, snowman[1:])[:-1] == [*[""] * (len(snowman) - 2), "\N{SNOWMAN}"]


def test_a_prompt_that_ends_with_a_replacement_character_is_not_repeated() -> None:
    prompt = "s = '\N{REPLACEMENT CHARACTER}"
    assert "".join(stream(TOKENIZER.encode(prompt), TOKENIZER.encode("x = 1")[1:])) == "x = 1"


def test_truncation_and_padding_of_training_are_left_out() -> None:
    padded = json.loads(TOKENIZER_JSON)
    padded["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    padded["padding"] = {
        "strategy": {"Fixed": 8},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 1,
        "pad_type_id": 0,
        "pad_token": "<|pad|>",
    }
    other = Tokenizer(json.dumps(padded).encode())
    for text in ("def add(a, b):\n    return a + b", "x"):
        assert other.encode(text) == TOKENIZER.encode(text)


def test_end_tokens_have_no_text() -> None:
    assert stream(TOKENIZER.encode("x = 1"), [END_OF_TEXT]) == ["", ""]


def test_a_renamed_token_is_named() -> None:
    renamed = Tokenizer(TOKENIZER_JSON.replace(b"<|pad|>", b"<|void|>"))
    assert "'<|pad|>'" in TOKENIZER.difference(renamed)


def test_swapped_tokens_are_named() -> None:
    ids = {token: TOKENIZER.encode(token)[1] for token in ("def", "class")}
    text = TOKENIZER_JSON.decode()
    text = text.replace(f'"def": {ids["def"]}', f'"def": {ids["class"]}', 1)
    text = text.replace(f'"class": {ids["class"]}', f'"class": {ids["def"]}', 1)
    assert text != TOKENIZER_JSON.decode()
    difference = TOKENIZER.difference(Tokenizer(text.encode()))
    assert "'def'" in difference or "'class'" in difference

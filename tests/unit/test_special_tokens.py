"""Special tokens in text: found in linear time, kept apart from those that are meant, and nothing else changes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers.models import WordLevel

from specd.text.chat import Chat
from specd.text.literals import Literals
from specd.text.special_tokens import pattern_of
from specd.text.tokenizer import Tokenizer
from tests.unit.growth import growth
from tests.unit.tokenizers_by_kind import KINDS, tokenizer_of

MEBIBYTE = 2**20


def unchanged(text: str) -> str:
    return text


def texts_with(special: list[str]) -> st.SearchStrategy[str]:
    parts = st.sampled_from(special) | st.text(max_size=6) | st.sampled_from([" ", "\n", "  ", "cat", "<", "</", "s>"])
    return st.lists(parts, max_size=10).map("".join)


@given(st.lists(st.text("ab<", min_size=1, max_size=5), min_size=1, max_size=8), st.text("ab<", max_size=30))
def test_the_longest_of_the_texts_is_found(texts: list[str], text: str) -> None:
    by_length = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
    assert [m.span() for m in pattern_of(texts).finditer(text)] == [m.span() for m in by_length.finditer(text)]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_what_nothing_changes_has_the_tokens_that_it_always_has(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    text = data.draw(texts_with(list(tokenizer.special_tokens.values())))
    assert tokenizer.encode_apart(text, unchanged) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_what_is_typed_is_never_a_special_token(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    special = list(tokenizer.special_tokens.values())
    typed = data.draw(texts_with([*special, *(token.upper() for token in special)]))
    meant = data.draw(st.lists(st.sampled_from(special), max_size=3))
    token_ids = tokenizer.encode_apart("x".join([*meant, "TYPED"]), lambda text: text.replace("TYPED", typed))
    alone = tokenizer.encode_apart("x".join([*meant, "TYPED"]), lambda text: text.replace("TYPED", "cat"))
    assert special_ids(tokenizer, token_ids) == special_ids(tokenizer, alone)


def special_ids(tokenizer: Tokenizer, token_ids: list[int]) -> list[int]:
    unknown = [token_id for token_id, text in tokenizer.special_tokens.items() if text in {"<unk>", "[UNK]"}]
    return [token_id for token_id in token_ids if token_id in tokenizer.special_tokens and token_id not in unknown]


@pytest.mark.parametrize("kind", KINDS)
def test_one_typed_token_changes_no_other_message(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    before = "</s>cat sat<|right|>\nthe mat <|left|> dog</s>"
    expected = tokenizer.encode(before, add_special_tokens=False)
    token_ids = tokenizer.encode_apart(f"{before}TYPED", lambda text: text.replace("TYPED", "</s> <|right|> "))
    assert token_ids[: len(expected)] == expected


def test_other_spellings_of_a_special_token_are_text_too() -> None:
    tokenizer = tokenizer_of("WordPiece")
    (upper,) = (token_id for token_id, text in tokenizer.special_tokens.items() if text == "<upper>")
    assert upper in tokenizer.encode("the <UPPER> cat", add_special_tokens=False)
    literals = Literals(tokenizer)
    chat = literals.hidden_in(Chat(({"role": "user", "content": "the <UPPER> cat"},)))
    assert upper not in literals.encode(chat.messages[0]["content"])


def with_special_tokens(number: int) -> Tokenizer:
    raw = HuggingFaceTokenizer(WordLevel({"?": 0}, unk_token="?"))
    raw.add_special_tokens([AddedToken(f"<|{i}_token|>", special=True) for i in range(number)])
    return Tokenizer(raw.to_str().encode())


def hide(tokenizer: Tokenizer, text: str, size: int) -> None:
    Literals(tokenizer).hidden_in(Chat(({"role": "user", "content": text * (size // len(text))},)))


@pytest.mark.parametrize("text", ["<|", "<|1", "<|7_token|>", "<|7_token"])
def test_hiding_takes_linear_time(text: str) -> None:
    tokenizer = with_special_tokens(256)
    assert growth(lambda size: hide(tokenizer, text, size), MEBIBYTE // 8) < 8


@pytest.mark.parametrize("text", ["<|", "<|7_token|>"])
def test_hiding_takes_the_same_time_for_any_number_of_special_tokens(text: str) -> None:
    tokenizers = {number: with_special_tokens(number) for number in (8, 8 * 64)}
    assert growth(lambda number: hide(tokenizers[number], text, MEBIBYTE // 8), 8, factor=64) < 8


@pytest.mark.parametrize("text", ["<|", "<|7_token|>"])
def test_encoding_takes_linear_time(text: str) -> None:
    tokenizer = with_special_tokens(256)

    def encode(size: int) -> None:
        literals = Literals(tokenizer)
        chat = literals.hidden_in(Chat(({"role": "user", "content": f"{text * (size // len(text))}<|1_token|>"},)))
        literals.encode(chat.messages[0]["content"])

    assert growth(encode, 2**14) < 8

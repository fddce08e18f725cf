"""Text streams of every kind of tokenizer: in sum the decoding of all tokens, in linear time."""

from __future__ import annotations

from itertools import chain, groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specd.text.tokenizer import Tokenizer
from tests.unit.growth import growth
from tests.unit.mortal_server import byte_tokenizer
from tests.unit.tokenizers_by_kind import KINDS, raw_tokenizer, tokenizer_of

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# What is linear grows as its size does, by 16, and what is quadratic by 256.
FACTOR = 16
MOST_GROWTH = 64.0


def streamed(tokenizer: Tokenizer, prompt_ids: list[int], token_ids: list[int]) -> str:
    text = tokenizer.stream_text(prompt_ids)
    return "".join([*(text.push(token_id) for token_id in token_ids), text.finish()])


def has_broken_bytes(kind: str, token_ids: list[int]) -> bool:
    """Whether bytes of a byte fallback are no text: decoding then takes back what was text before."""
    special = tokenizer_of(kind).special_tokens
    tokens = [raw_tokenizer(kind).id_to_token(token_id) for token_id in token_ids if token_id not in special]
    for is_byte, run in groupby(filter(None, tokens), key=lambda token: token.startswith("<0x")):
        try:
            bytes.fromhex("".join(token[3:5] for token in run) if is_byte else "").decode()
        except UnicodeDecodeError:
            return True
    return False


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_the_pieces_are_the_decoding_of_all_tokens(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    # Beyond the vocabulary, too: the rows of an embedding table can be more than that.
    any_id = st.integers(0, tokenizer.vocabulary_size + 2) | st.sampled_from(sorted(tokenizer.special_tokens))
    text_ids = st.text(max_size=20).map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    ids = st.lists(st.lists(any_id, max_size=6) | text_ids, max_size=5).map(lambda parts: list(chain(*parts)))
    prompt_ids, token_ids = data.draw(ids), data.draw(ids)
    if has_broken_bytes(kind, [*prompt_ids, *token_ids]) or has_broken_bytes(kind, prompt_ids):
        return
    before = tokenizer.decode(prompt_ids, skip_special_tokens=True)
    whole = tokenizer.decode([*prompt_ids, *token_ids], skip_special_tokens=True)
    if whole.startswith(before):  # the prompt can end inside a character
        assert streamed(tokenizer, prompt_ids, token_ids) == whole[len(before) :]


@given(st.lists(st.integers(0, 255), max_size=30), st.lists(st.integers(0, 255), max_size=30))
def test_bytes_are_decoded_as_all_at_once(prompt_ids: list[int], token_ids: list[int]) -> None:
    tokenizer = byte_tokenizer()
    before = tokenizer.decode(prompt_ids, skip_special_tokens=True)
    whole = tokenizer.decode([*prompt_ids, *token_ids], skip_special_tokens=True)
    if whole.startswith(before):
        assert streamed(tokenizer, prompt_ids, token_ids) == whole[len(before) :]


def test_special_tokens_inside_a_character_leave_it_whole() -> None:
    tokenizer = byte_tokenizer()
    (end,) = tokenizer.special_tokens
    first, *rest = "\N{SNOWMAN}".encode()
    assert streamed(tokenizer, [], [first, end, end, *rest]) == "\N{SNOWMAN}"


@pytest.mark.parametrize("byte", ["<0xFF>", "<0xE2>"])
def test_what_cannot_become_a_character_is_shown_within_four_bytes(byte: str) -> None:
    kind = "BPE with byte fallback"
    of_fallback = raw_tokenizer(kind).get_vocab()[byte]
    for tokenizer, broken in ((tokenizer_of(kind), of_fallback), (byte_tokenizer(), int(byte[3:5], 16))):
        text = tokenizer.stream_text(tokenizer.encode("x"))
        shown = "".join(text.push(broken) for _ in range(100))
        assert len(shown) >= 97
        assert set(shown) == {REPLACEMENT}
        assert shown + text.finish() == REPLACEMENT * 100


def test_broken_bytes_take_nothing_back_and_break_nothing() -> None:
    kind = "BPE with byte fallback"
    bytes_ = [raw_tokenizer(kind).get_vocab()[f"<0x{byte:02X}>"] for byte in "\N{SNOWMAN}".encode() + b"\xff"]
    text = tokenizer_of(kind).stream_text(tokenizer_of(kind).encode("x"))
    pieces = [text.push(token_id) for token_id in (*bytes_, tokenizer_of(kind).encode("cat")[-1])]
    assert pieces[:4] == ["", "", "\N{SNOWMAN}", REPLACEMENT]
    assert pieces[4]


@pytest.mark.parametrize(
    "name", ["</s>", "<0xFF>", "<0xE2>", "unknown"], ids=["special", "broken", "incomplete", "beyond the vocabulary"]
)
def test_time_is_linear_in_tokens_that_give_no_text(name: str) -> None:
    kind = "BPE with byte fallback"
    tokenizer = tokenizer_of(kind)
    token_id = raw_tokenizer(kind).token_to_id(name)
    ids = [tokenizer.vocabulary_size + 1 if token_id is None else token_id]
    assert growth(lambda size: streamed(tokenizer, ids, ids * size), 500, FACTOR) < MOST_GROWTH


@pytest.mark.parametrize("byte", [0xFF, 0xE2, 256], ids=["broken", "incomplete", "special"])
def test_time_is_linear_in_bytes_that_give_no_text(byte: int) -> None:
    assert growth(lambda size: streamed(byte_tokenizer(), [], [byte] * size), 500, FACTOR) < MOST_GROWTH

"""Text streams: whole characters, and in sum the decoding of all tokens."""

from __future__ import annotations

import json
import string
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as HuggingFaceTokenizer

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


def metaspace_tokenizer(*, byte_fallback: bool) -> Tokenizer:
    """A tokenizer like Llama 2's: spaces are `▁`, and what has no token is its bytes."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *string.ascii_letters, "▁a", "##"]
    model = models.BPE(
        {piece: i for i, piece in enumerate(pieces)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True
    )
    made = HuggingFaceTokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps) if byte_fallback else decoders.Metaspace()
    made.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(made.to_str().encode())


LLAMA_LIKE = metaspace_tokenizer(byte_fallback=True)


@given(st.text(max_size=40))
def test_own_bytes_of_tokens_make_the_text_together(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert b"".join(map(TOKENIZER.token_bytes.of, ids)) == text.encode()
    # `Prepend` leaves an empty text alone.
    ids = LLAMA_LIKE.encode(text, add_special_tokens=False)
    spaced = text.replace("▁", " ")
    assert b"".join(map(LLAMA_LIKE.token_bytes.of, ids)) == (f" {spaced}" if text else "").encode()


def test_a_token_has_its_space_and_a_special_one_its_name() -> None:
    for tokenizer in (LLAMA_LIKE, metaspace_tokenizer(byte_fallback=False)):
        with_space, without = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("xa")[-1:]
        assert [tokenizer.token_bytes.of(token_id) for token_id in (*with_space, *without)] == [b" a", b"a"]
        assert tokenizer.token_bytes.of(1) == b"</s>"
        assert tokenizer.token_bytes.of(10**6) == b""
    assert TOKENIZER.token_bytes.of(END_OF_TEXT) == TOKENIZER.special_tokens[END_OF_TEXT].encode()
    # It has a character that stands for no byte, so the tokenizer takes it as it is.
    added = HuggingFaceTokenizer.from_str(TOKENIZER_JSON.decode())
    added.add_tokens(["→end→"])
    tokenizer = Tokenizer(added.to_str().encode())
    assert tokenizer.token_bytes.of(tokenizer.encode("→end→")[-1]) == "→end→".encode()

"""Log-probabilities over HTTP: each token has its own name and bytes, and none is lost."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from gateway.chat.log_probabilities import content_of
from gateway.completions.log_probabilities import lists_of
from specd.client import CompletionToken
from specd.sampling import RankedToken, TokenLogProbabilities
from specd.vocabulary import TokenSource

# Tokens of one text, and parts of characters.
OWN = [b"a", b"a", b" a", b"\xf0\x9f", b"\xf0\x9f", b"\x80", b"", b""]


def of(token_id: int, text: str, own: bytes, value: float, top: Sequence[RankedToken]) -> CompletionToken:
    values = TokenLogProbabilities(value, top_model=top)
    return CompletionToken(token_id, text, TokenSource.TARGET, values, own_bytes=own)


def distribution(values: dict[int, float], sampled: int) -> CompletionToken:
    top = [
        RankedToken(token_id, value, OWN[token_id]) for token_id, value in values.items() if token_id % 2 or value > -5
    ]
    return of(sampled, "", OWN[sampled], values.get(sampled, -9.5), top)


TOKEN_IDS = st.integers(0, len(OWN) - 1)
TOKENS = st.builds(distribution, st.dictionaries(TOKEN_IDS, st.floats(-9, 0)), TOKEN_IDS)


def token(own: bytes, text: str = "", *top: RankedToken, token_id: int = 1) -> CompletionToken:
    return of(token_id, text, own, -1.0, top)


@given(st.lists(TOKENS, max_size=4))
def test_each_of_the_most_likely_tokens_is_there_and_so_is_the_sampled_one(tokens: list[CompletionToken]) -> None:
    lists = lists_of(tokens, 0)
    for each, name, value, top in zip(
        tokens, lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True
    ):
        assert each.log_probabilities is not None
        values = {ranked.token_id: ranked.log_probability for ranked in each.log_probabilities.top_model}
        assert top[name] == value
        assert sorted(top.values()) == sorted({each.id: value, **values}.values())
        assert list(top.values())[: len(values)] == list(values.values())


def test_parts_of_characters_are_named_as_openai_does() -> None:
    face = "\N{GRINNING FACE}".encode()
    tokens = [
        token(face[:2], "", RankedToken(1, -1.0, face[:2]), RankedToken(2, -2.0, b" \xf0")),
        token(face[2:], "😀"),
    ]
    lists = lists_of([*tokens, token(b"<|end|>")], 7)
    assert lists["tokens"] == [r"bytes:\xf0\x9f", r"bytes:\x98\x80", "<|end|>"]
    assert lists["text_offset"] == [7, 7, 8]
    assert lists["top_logprobs"][0] == {r"bytes:\xf0\x9f": -1.0, r"bytes: \xf0": -2.0}

    entries = content_of(tokens)["content"]
    assert [entry["token"] for entry in entries] == [r"\xf0\x9f", r"\x98\x80"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == face
    assert [ranked["bytes"] for ranked in entries[0]["top_logprobs"]] == [list(face[:2]), list(b" \xf0")]


def test_what_is_held_back_or_ends_a_reply_has_its_own_text() -> None:
    entries = content_of([token(b"STO"), token(b"RY", "STORY"), token(b"<|end|>")])["content"]
    assert [entry["token"] for entry in entries] == ["STO", "RY", "<|end|>"]


def test_tokens_of_one_text_are_told_apart() -> None:
    top = (RankedToken(65, -0.5, b"A"), RankedToken(7, -1.0, b"A"), RankedToken(9, -2.0, b"B"))
    assert lists_of([token(b"A", "A", *top, token_id=7)], 0)["top_logprobs"] == [
        {"token_id:65": -0.5, "A": -1.0, "B": -2.0}
    ]

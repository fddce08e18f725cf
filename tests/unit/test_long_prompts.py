"""Prompts that are far longer than the context are refused by their beginnings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.sessions.prompt import check_beginning
from specd.errors import InvalidRequestError
from specd.settings import EMBEDDED_TARGET
from specd.text.chat import Chat
from specd.text.tokenizer import Tokenizer

TOKENIZER_JSON = (Path(EMBEDDED_TARGET) / "tokenizer.json").read_bytes()
CONTEXT = 512
LONG = 2**20


class Counting(Tokenizer):
    """A tokenizer that counts the characters that it encodes."""

    num_characters = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.num_characters += len(text)
        return super().encode(text, add_special_tokens=add_special_tokens)

    def encode_apart(self, text: str, change: Any) -> list[int]:
        self.num_characters += len(text)
        return super().encode_apart(text, change)


@pytest.fixture
def tokenizer() -> Counting:
    return Counting(TOKENIZER_JSON)


def said(*contents: str) -> Chat:
    return Chat(tuple({"role": "user", "content": content} for content in contents))


@pytest.mark.parametrize(
    "prompt",
    [
        "x" * LONG,
        "def f(x): return x\n" * (LONG // 18),
        said("x" * LONG),
        said(*["some words of a message " * 50] * 1000),
        said("<|endoftext|>" * (LONG // 13)),
        "<|endoftext|>" * (LONG // 13),
    ],
    ids=["line", "code", "said", "messages", "special tokens said", "special tokens"],
)
def test_a_prompt_far_beyond_the_context_is_refused_by_its_beginning(tokenizer: Counting, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"maximum context length is {CONTEXT} tokens") as raised:
        check_beginning(tokenizer, prompt, CONTEXT)
    assert raised.value.reason == "CONTEXT_EXCEEDED"
    assert tokenizer.num_characters < LONG / 8


@pytest.mark.parametrize("prompt", ["", "x", None, said("x"), [5] * LONG, "x" * 10 * CONTEXT, said("x" * CONTEXT)])
def test_one_that_may_have_room_is_left_to_its_encoding(tokenizer: Counting, prompt: Any) -> None:
    check_beginning(tokenizer, prompt, CONTEXT)
    assert tokenizer.num_characters == 0


def test_a_long_text_of_few_tokens_is_not_refused() -> None:
    """Spaces, of which a token has many."""
    tokenizer = Tokenizer(TOKENIZER_JSON)
    per_token = 4096 / len(tokenizer.encode(" " * 4096))
    if per_token < 2:
        pytest.skip("this tokenizer has no token of many spaces")
    context = 4096
    check_beginning(tokenizer, " " * int(context * per_token), context)

"""The grammar of a whole reply: any reasoning, and behind it an answer in its form."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import tokenizers
from tokenizers import AddedToken

from specd.grammar import MAX_GRAMMAR_BYTES, Grammar
from specd.matching.matcher import SessionMatcher
from specd.matching.vocabulary import GrammarVocabulary
from specd.settings import EMBEDDED_TARGET
from specd.text.reasoning import ReasoningMarkers, reply_grammar
from specd.text.tokenizer import Tokenizer
from tests.unit.random_replies import random_reply

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
ANSWERS = {
    '{"ok": true}': Grammar.json_schema(json.dumps(SCHEMA)),
    '{"any": [1]}': Grammar.json_object(),
    "ab/c": Grammar.regex("a[b-c]/c"),
    "kkx": Grammar.lark('start: many "x"\nmany: "k"+'),
}
TEXT = ReasoningMarkers("<think>", "</think>")
MARKERS = {
    "text": TEXT,
    "tokens": ReasoningMarkers("<|a|>", "<|b|>"),
    "a token with text": ReasoningMarkers("<|a|>think<|c|>", "<|b|>think<|c|>"),
    "text with a token": ReasoningMarkers("think<|a|>", "done<|b|>."),
    "one end token": ReasoningMarkers("<think>", "<|b|>"),
}


@cache
def tokenizer() -> Tokenizer:
    own = tokenizers.Tokenizer.from_file(str(Path(EMBEDDED_TARGET) / "tokenizer.json"))
    own.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<|a|>", "<|b|>", "<|c|>")])
    return Tokenizer(own.to_str().encode())


@cache
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer(), size=tokenizer().vocabulary_size, eos_token_ids=[0])


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def matcher(answer: Grammar, markers: ReasoningMarkers, prompt_end: str = "") -> SessionMatcher:
    prompt_ids = encode(f"say{prompt_end}")
    following = SessionMatcher(vocabulary(), reply_grammar(tokenizer(), prompt_ids, answer, markers))
    following.follow(prompt_ids)
    return following


@pytest.mark.parametrize("name", MARKERS)
@pytest.mark.parametrize("said", ANSWERS)
def test_a_reply_reasons_or_does_not_and_then_keeps_the_form(name: str, said: str) -> None:
    answer, markers = ANSWERS[said], MARKERS[name]
    reasoning = f'any "text", {{ <thin {markers.end}'
    # The form of one token begins right behind it.
    behind = [f"{reasoning}{said}"] + ([f"{reasoning}\n\n{said}"] if "text" in name else [])
    for prompt_end in ("", markers.begin, f"{markers.begin}\n"):
        begin = "" if prompt_end else markers.begin
        for text in [*(begin + text for text in behind), *([] if prompt_end else [said])]:
            following, token_ids = matcher(answer, markers, prompt_end), encode(text)
            assert following.num_allowed(token_ids) == len(token_ids), text
            following.follow(token_ids, following.end)
            (mask,) = following.masks([])
            assert mask is not None and mask[0] & 1, "it may end"
        if prompt_end:
            continue
        for text in (f"{said}{said}", f"x{said}", f"{begin}{reasoning}no"):
            assert matcher(answer, markers, prompt_end).num_allowed(encode(text)) < len(encode(text)), text


@pytest.mark.parametrize("prompt_end", ["", "<think>"])
def test_a_model_that_knows_nothing_ends_with_an_answer(prompt_end: str) -> None:
    answer, ends = ANSWERS['{"ok": true}'], encode(TEXT.end)
    for seed in range(10):
        begun = [*encode(f"say{prompt_end}"), *encode("" if prompt_end else TEXT.begin), *encode("any text"), *ends]
        token_ids = random_reply(matcher(answer, TEXT, prompt_end), tokenizer(), seed, begun=begun)
        text = tokenizer().decode(token_ids, skip_special_tokens=True)
        if token_ids[-1] == 0:
            jsonschema.validate(json.loads(text.partition(TEXT.end)[2]), SCHEMA)


def test_a_grammar_that_grows_too_long_is_refused() -> None:
    schema = {"enum": ["ü" * (MAX_GRAMMAR_BYTES // 4)]}
    with pytest.raises(ValueError, match="more than"):
        reply_grammar(tokenizer(), [1], Grammar.json_schema(json.dumps(schema, ensure_ascii=False)), TEXT)

"""Grammars over the tokens of a session: what may come next is a function of its tokens, through any rewinds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specd.errors import CacheTooShortError, InvalidRequestError
from specd.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind, ReasoningTokens, SessionGrammar
from specd.matching.matcher import Mask, SessionMatcher
from specd.matching.vocabulary import GrammarVocabulary
from specd.settings import EMBEDDED_TARGET
from specd.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["red", "green", 3]}, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "object": Grammar(GrammarKind.JSON_OBJECT),
    "regex": Grammar(GrammarKind.REGEX, "[a-c]{1,4}(-[0-9]+)?"),
    "lark": Grammar(GrammarKind.LARK, 'start: "if " NAME ":"\nNAME: /[a-z]+/'),
    "brackets": Grammar(GrammarKind.LARK, 'start: "(" WORD ")" | "[" WORD "]"\nWORD: /"[a-z]*"/'),
}
BEGINS_AT, EOS = 3, 0
THINK, DONE = 600, 601  # any tokens of the vocabulary that are not special
REASONING = {
    "none": None,
    "open": ReasoningTokens(DONE, is_open=True),
    "possible": ReasoningTokens(DONE, THINK),
    "possible and open": ReasoningTokens(DONE, THINK, is_open=True),
}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer((Path(EMBEDDED_TARGET) / "tokenizer.json").read_bytes())


@cache
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer(), size=tokenizer().vocabulary_size, eos_token_ids=[EOS])


def matcher(grammar: str = "schema", reasoning: str = "none") -> SessionMatcher:
    return SessionMatcher(vocabulary(), SessionGrammar(GRAMMARS[grammar], BEGINS_AT, REASONING[reasoning]))


def allowed(mask: Mask | None) -> list[int]:
    """Return the tokens that a mask allows. No mask allows all."""
    size = vocabulary().size
    return list(range(size)) if mask is None else [*np.flatnonzero(np.unpackbits(mask, bitorder="little")[:size])]


def text(data: st.DataObject, matcher: SessionMatcher, tokens: Sequence[int], most: int) -> list[int]:
    """Return tokens that a matcher allows behind those of its session."""
    chosen: list[int] = []
    for _ in range(data.draw(st.integers(1, most))):
        matcher.follow([*tokens, *chosen])
        (mask,) = matcher.masks([])
        choice = allowed(mask)
        if not choice:
            break
        favourites = [token for token in (THINK, DONE, EOS) if token in choice]
        chosen.append(int(data.draw(st.sampled_from(favourites + choice[:50] + choice[-50:]))))
    matcher.follow(tokens)
    return chosen


def same_masks(one: Sequence[Mask | None], other: Sequence[Mask | None]) -> bool:
    return [allowed(mask) for mask in one] == [allowed(mask) for mask in other]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), grammar=st.sampled_from([*GRAMMARS]), reasoning=st.sampled_from([*REASONING]))
def test_a_matcher_after_any_rewinds_equals_a_fresh_one(data: st.DataObject, grammar: str, reasoning: str) -> None:
    prompt = [7, 8, 9]
    session = matcher(grammar, reasoning)
    tokens = list(prompt)
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(0, len(tokens)))  # as a worker gets them: tokens from a position on
        kept = max(position, min(len(tokens), len(prompt)))
        del tokens[kept:]
        tokens += text(data, matcher(grammar, reasoning), tokens, 8)
        session.follow(tokens[position:], position)
        fresh = matcher(grammar, reasoning)
        fresh.follow(tokens)
        proposal = text(data, matcher(grammar, reasoning), tokens, 4)
        proposal += data.draw(st.lists(st.integers(0, 8191), max_size=2))
        assert session.num_allowed(proposal) == fresh.num_allowed(proposal)
        assert session.forced() == fresh.forced()
        follows = data.draw(st.booleans())
        assert same_masks(session.masks(proposal, follows=follows), fresh.masks(proposal))
        if not follows:
            assert same_masks(session.masks([]), fresh.masks([])), "nothing of the proposal is left behind"


@settings(max_examples=60, deadline=None)
@given(data=st.data(), grammar=st.sampled_from([*GRAMMARS]), reasoning=st.sampled_from([*REASONING]))
def test_masks_are_of_each_place_of_a_proposal(data: st.DataObject, grammar: str, reasoning: str) -> None:
    """Each is that of a session with the tokens before it; behind a forbidden token all is allowed."""
    session, one_by_one = matcher(grammar, reasoning), matcher(grammar, reasoning)
    proposal = text(data, session, [7, 8, 9], 10) + data.draw(st.lists(st.integers(0, 8191), max_size=2))
    masks = session.masks(proposal)
    assert len(masks) == len(proposal) + 1
    num_allowed = session.num_allowed(proposal)
    for i, token in enumerate(proposal):
        assert allowed(masks[i]) == allowed(one_by_one.masks([])[0])
        assert (token in allowed(masks[i])) == (i < num_allowed)
        if i == num_allowed:
            assert masks[i + 1 :] == [None] * (len(proposal) - i)
            break
        one_by_one.follow([7, 8, 9, *proposal[: i + 1]])


def test_the_text_of_a_schema_is_valid_json_and_ends_where_it_may() -> None:
    session = matcher()
    tokens = tokenizer().encode('{"name": "Ada", "tags": ["red", 3]}', add_special_tokens=False)
    masks = session.masks([*tokens, EOS])
    ends = [EOS in allowed(mask) for mask in masks]
    assert ends == [False] * len(tokens) + [True, False]
    assert allowed(masks[-1]) == []
    assert session.num_allowed([*tokens, EOS, EOS]) == len(tokens) + 1


def test_reasoning_is_free_and_the_grammar_begins_behind_it() -> None:
    session = matcher("regex", "possible")
    first = allowed(session.masks([])[0])
    assert THINK in first and DONE not in first
    masks = session.masks([THINK, 77, 78, DONE])
    assert masks[1:4] == [None, None, None]
    assert allowed(masks[4]) == [token for token in first if token != THINK]
    a, c = (tokenizer().encode(letter, add_special_tokens=False)[0] for letter in "ac")
    assert session.num_allowed([a, THINK]) == 1, "only the first token begins reasoning"
    assert session.num_allowed([THINK, 77, DONE, c, THINK]) == 4


def test_a_token_that_the_grammar_forbids_is_named_with_its_place() -> None:
    session = matcher("regex")
    a = tokenizer().encode("a", add_special_tokens=False)[0]
    with pytest.raises(InvalidRequestError, match="the grammar forbids token 77 at position 4") as raised:
        session.follow([7, 8, 9, a, 77])
    assert raised.value.reason == "GRAMMAR_BROKEN"
    session.follow([7, 8, 9, a])


def test_tokens_that_are_not_known_are_asked_for() -> None:
    with pytest.raises(CacheTooShortError, match="the cache holds 3 tokens"):
        matcher().follow([1], 9)


BAD = {
    "a keyword that is not enforced": (GrammarKind.JSON_SCHEMA, '{"uniqueItems": true}', 'keys: \\["uniqueItems"\\]'),
    "no JSON": (GrammarKind.JSON_SCHEMA, "{", "is not JSON: "),
    "a half of a surrogate pair": (GrammarKind.JSON_SCHEMA, '{"const": "\ud800"}', "surrogates not allowed"),
    "no schema": (GrammarKind.JSON_SCHEMA, "[1]", "cannot be kept"),
    "nothing matches a schema": (GrammarKind.JSON_SCHEMA, '{"enum": []}', "Unsatisfiable"),
    "nothing matches a regex": (GrammarKind.REGEX, r"[^\s\S]", "no text matches it"),
    "a broken regex": (GrammarKind.REGEX, "[a-", "unclosed character class"),
    "an unknown rule": (GrammarKind.LARK, "start: other", "unknown name"),
    "nesting": (GrammarKind.JSON_SCHEMA, '{"items":' * 5000 + "true" + "}" * 5000, "nests deeper than 64"),
    "empty": (GrammarKind.REGEX, "", "is empty"),
    "too long": (GrammarKind.REGEX, "a" * (MAX_GRAMMAR_BYTES + 1), "at most 65536"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_grammar_that_cannot_be_kept_is_refused_with_the_reason(name: str) -> None:
    kind, source, reason = BAD[name]
    with pytest.raises(InvalidRequestError, match=reason) as raised:
        vocabulary().compile(Grammar(kind, source))
    assert len(str(raised.value)) < 500


def test_a_mask_is_not_that_of_a_rejected_proposal() -> None:
    """Within the word both brackets have the same state of the lexer, so llguidance would take one mask for both."""
    session, masks = matcher("brackets"), []
    for bracket in "([([":
        session.follow(tokenizer().encode(f'{bracket}"', add_special_tokens=False), BEGINS_AT)
        masks.append(allowed(session.masks([])[0]))
    round_end, square_end = (tokenizer().encode(f'"{end}', add_special_tokens=False)[0] for end in ")]")
    assert [round_end in mask for mask in masks] == [True, False, True, False]
    assert [square_end in mask for mask in masks] == [False, True, False, True]


def test_a_limit_that_one_session_meets_leaves_others_of_the_same_grammar_alone() -> None:
    grammar = SessionGrammar(Grammar.regex("(.*a.{18}b.{0,40}|[a-z]{1,2000})*c"), 0)
    first, second = (SessionMatcher(vocabulary(), grammar) for _ in range(2))
    text = tokenizer().encode("abacabadabacaba" * 30, add_special_tokens=False)
    first.follow(text[:3])
    assert second.end == 0
    assert second.num_allowed(text[:3]) == 3
    with pytest.raises(InvalidRequestError, match="too large to be followed"):
        first.masks(text[3:])
    assert allowed(second.masks([])[0])


def test_a_model_without_an_end_token_has_no_grammars() -> None:
    without = GrammarVocabulary(tokenizer(), size=8192, eos_token_ids=[])
    with pytest.raises(InvalidRequestError, match="no end token"):
        without.compile(GRAMMARS["object"])


def test_an_end_token_with_a_text_ends_no_text_with_a_form() -> None:
    """Its text would be a part of the answer. Nor can it be a part of a string, because it would end it."""
    (word,) = tokenizer().encode(" =", add_special_tokens=False)
    ends = GrammarVocabulary(tokenizer(), size=tokenizer().vocabulary_size, eos_token_ids=[EOS, word])
    session = SessionMatcher(ends, SessionGrammar(Grammar.regex("(x[ =]*)*"), 0))
    assert EOS in allowed(session.masks([])[0])
    assert word not in allowed(session.masks([])[0])
    session.follow(tokenizer().encode("x", add_special_tokens=False))
    assert word not in allowed(session.masks([])[0])
    only = GrammarVocabulary(tokenizer(), size=tokenizer().vocabulary_size, eos_token_ids=[word])
    assert only.eos_token_ids == [word]

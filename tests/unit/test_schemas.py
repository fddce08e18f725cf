"""JSON schemas that people have written: valid instances are allowed token by token, and invalid ones are not."""

from __future__ import annotations

import contextlib
import json

import jsonschema
import pytest

from specd.errors import InvalidRequestError
from specd.grammar import Grammar, GrammarKind, SessionGrammar
from specd.matching.matcher import SessionMatcher
from tests.maskbench import schemas
from tests.thorough import examples
from tests.unit.random_replies import random_reply
from tests.unit.test_session_matcher import EOS, tokenizer, vocabulary

FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


def test_instances_of_schemas_are_judged_as_their_authors_judge_them() -> None:
    refused, wrong, num_instances = [], [], 0
    for each in schemas():
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(each["schema"]))
        try:
            matcher = SessionMatcher(vocabulary(), SessionGrammar(grammar, 0))
        except InvalidRequestError as error:
            refused.append(f"{each['name']}: {error}")
            continue
        for test in each["tests"]:
            num_instances += 1
            text = json.dumps(test["data"], ensure_ascii=False)
            tokens = [*tokenizer().encode(text, add_special_tokens=False), EOS]
            if (matcher.num_allowed(tokens) == len(tokens)) != test["valid"]:
                wrong.append(f"{each['name']}: {'valid' if test['valid'] else 'invalid'} {text[:200]}")
    print(f"{len(refused)} refused, {num_instances} instances, {len(wrong)} wrong", *refused, *wrong, sep="\n")
    assert num_instances > 300
    assert wrong == []


@pytest.mark.parametrize("seed", examples(range(5), 1))
def test_random_answers_are_valid_by_another_library(seed: int) -> None:
    """A model of random weights at any temperature keeps every schema that is taken, if it comes to an end."""
    num_whole, wrong = 0, []
    for number, each in enumerate(schemas()):
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(each["schema"]))
        with contextlib.suppress(InvalidRequestError):
            matcher = SessionMatcher(vocabulary(), SessionGrammar(grammar, 0))
            token_ids = random_reply(matcher, tokenizer(), 1000 * number + seed, most=200)
            if token_ids[-1] != EOS:
                continue
            num_whole += 1
            text = tokenizer().decode(token_ids, skip_special_tokens=True)
            try:
                jsonschema.validate(json.loads(text), each["schema"], format_checker=FORMATS)
            except (ValueError, jsonschema.ValidationError) as error:
                wrong.append(f"{each['name']}: {text[:300]!r}: {str(error)[:300]}")
    print(f"{num_whole} answers, {len(wrong)} wrong", *wrong, sep="\n")
    assert num_whole > 100
    assert wrong == []

"""JSON schemas that people have written: valid instances are allowed token by token, and invalid ones are not."""

from __future__ import annotations

import json

from specd.errors import InvalidRequestError
from specd.grammar import Grammar, GrammarKind, SessionGrammar
from specd.matching.matcher import SessionMatcher
from tests.maskbench import schemas
from tests.unit.test_session_matcher import EOS, tokenizer, vocabulary


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

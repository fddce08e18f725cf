"""Grammars of tool calls: models that know nothing write calls that are read, and that keep their schemas."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from gateway.calls.grammar import can_be_kept, grammar_of
from gateway.calls.parameters import without_annotations
from gateway.calls.tool_choice import ToolChoice
from gateway.http.errors import ApiError
from gateway.reply.format import ReplyFormat, detect_format
from gateway.reply.parts import Kind, Text
from gateway.reply.reader import ReplyReader
from gateway.reply.tool_parsers import ToolCall
from specd.client import CompletionToken, Grammar
from specd.errors import InvalidRequestError
from specd.grammar import SessionGrammar
from specd.matching.matcher import SessionMatcher
from specd.matching.vocabulary import GrammarVocabulary
from specd.settings import EMBEDDED_TARGET
from specd.text.tokenizer import Tokenizer
from specd.vocabulary import TokenSource
from tests.unit.random_replies import random_reply
from tests.unit.reply_forms import FORMS, TOOLS, pieces

# What the grammars are written for: forms of calls that have a syntax.
WRITTEN = [name for name, form in FORMS.items() if detect_format(form.template, {}).syntax.calls]
_SOME_CALL: Any = [("f", {"x": 1})]
SPECIAL = sorted(
    {
        piece
        for form in FORMS.values()
        for said in (
            form.write_calls(_SOME_CALL) if form.write_calls is not None else "",
            form.write_reasoning("x") if form.write_reasoning is not None else "",
            form.write_content("x"),
        )
        for piece, is_special in pieces(said)
        if is_special
    }
    | {'<|"|>'}
)
PARAMETERS: Sequence[dict[str, Any]] = (
    {
        "type": "object",
        "description": "What it is about.",
        "properties": {
            "path": {"type": "string", "description": "Where."},
            "size": {"type": "integer", "minimum": 0, "maximum": 99},
            "mode": {"enum": ["r", "w", "null", "1"]},
            "note": {"type": ["string", "null"]},
        },
        "required": ["path", "mode", "note"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "first": {"$ref": "#/$defs/Point"},
            "all": {"type": "array", "items": {"$ref": "#/$defs/Point"}, "minItems": 1, "maxItems": 2},
            "label": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "on": {"type": "boolean"},
            "description": {"type": "string", "maxLength": 4},
        },
        "required": ["all", "on"],
        "$defs": {
            "Point": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "tags": {"type": "array", "items": {"type": "string"}}},
                "required": ["x"],
            }
        },
    },
    {"type": "object", "properties": {}},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-c]{1,3}$"}, "b": {"const": 3}}},
)


def tools(*schemas: Mapping[str, Any], strict: bool = True) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": f"do_{i}", "parameters": schema, "strict": strict}}
        for i, schema in enumerate(schemas)
    ]


@cache
def tokenizer(special: bool) -> Tokenizer:
    """The tokens of the included model, and the markers of all forms, if they are to be `special`."""
    own = tokenizers.Tokenizer.from_file(str(Path(EMBEDDED_TARGET) / "tokenizer.json"))
    if special:
        own.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return Tokenizer(own.to_str().encode())


@cache
def vocabulary(special: bool) -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer(special), size=tokenizer(special).vocabulary_size, eos_token_ids=[0])


def matcher(grammar: Grammar, special: bool) -> SessionMatcher:
    return SessionMatcher(vocabulary(special), SessionGrammar(grammar, 0))


def format_of(name: str) -> ReplyFormat:
    return detect_format(FORMS[name].template, {})


def written(name: str, choice: ToolChoice, special: bool, answer: Grammar | None = None) -> Grammar:
    syntax = format_of(name).syntax
    assert can_be_kept(syntax, choice)
    return grammar_of(syntax, choice, tokenizer(special).special_tokens, answer)


def some_reply(grammar: Grammar, special: bool, seed: int) -> list[int]:
    """Return a reply of a model that knows nothing; it has an end token if it came to an end."""
    return random_reply(matcher(grammar, special), tokenizer(special), seed)


def read(name: str, token_ids: Sequence[int], special: bool, offered: Sequence[Mapping[str, Any]]) -> Any:
    """Return the calls, the content and the reader of a reply."""
    own = tokenizer(special)
    stream = own.stream_text([])
    reader = ReplyReader(
        format_of(name), tools=offered, special_tokens=own.special_tokens, prompt_end=FORMS[name].prompt_end
    )
    tokens = [CompletionToken(i, stream.push(i), TokenSource.TARGET) for i in token_ids if i != 0]
    tokens.append(CompletionToken(0, stream.finish(), TokenSource.TARGET))
    parts = reader.push(tokens, is_last=True) + reader.finish(is_cut=False)
    calls = [part for part in parts if isinstance(part, ToolCall)]
    return calls, [part.text for part in parts if isinstance(part, Text) and part.kind is Kind.CONTENT], reader


def is_valid(call: ToolCall, offered: Sequence[Mapping[str, Any]]) -> None:
    (schema,) = [tool["function"]["parameters"] for tool in offered if tool["function"]["name"] == call.name]
    jsonschema.validate(json.loads(call.arguments), schema)


@pytest.mark.parametrize("special", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_model_that_knows_nothing_makes_the_calls_that_it_must(name: str, special: bool) -> None:
    num_whole = 0
    for seed in range(3):
        offered = tools(*random.Random(seed).sample(PARAMETERS, 1 + seed % 3))
        grammar = written(name, ToolChoice(offered, must_call=True, has_parallel_calls=seed % 2 > 0), special)
        token_ids = some_reply(grammar, special, seed)
        if token_ids[-1] != 0:
            continue
        num_whole += 1
        text = tokenizer(special).decode(token_ids, skip_special_tokens=False)
        calls, content, reader = read(name, token_ids, special, offered)
        assert calls, text
        assert not reader.broken_call, text
        assert not "".join(content).strip(), text
        for call in calls:
            is_valid(call, offered)
        if seed % 2 == 0:
            assert len(calls) == 1
    assert num_whole


@pytest.mark.parametrize("special", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("name", WRITTEN)
def test_what_the_form_documents_may_be_written(name: str, special: bool) -> None:
    """By free tools and strict ones, one call and several."""
    form = FORMS[name]
    assert form.write_calls is not None
    calls: Any = [("write", {"path": "a b/ü.py", "size": 7}), ("get_time", {"path": "x"})]
    for strict in (False, True):
        offered = [{**tool, "function": {**tool["function"], "strict": strict}} for tool in TOOLS]
        grammar = written(name, ToolChoice(offered, must_call=True), special)
        for said in (calls[:1], calls[1:], *([calls] if form.max_calls > 1 else [])):
            text = "".join(piece for piece, _ in pieces(form.write_calls(said))).removesuffix("<|call|>").rstrip("\n")
            text = text.removeprefix("<|start|>assistant").replace("'", '"')  # Python has both quotes
            if name in HAVE_OTHER_FORMS or (name == "harmony" and len(said) > 1):
                continue
            token_ids = tokenizer(special).encode(text, add_special_tokens=False)
            following = matcher(grammar, special)
            allowed = following.num_allowed(token_ids)
            assert allowed == len(token_ids), tokenizer(special).decode(
                token_ids[: allowed + 1], skip_special_tokens=False
            )
            following.follow(token_ids)
            (mask,) = following.masks([])
            assert mask is not None and mask[0] & 1, "it may end"


@pytest.mark.parametrize("special", [False, True], ids=["text", "tokens"])
def test_a_call_comes_behind_any_number_of_thoughts(special: bool) -> None:
    syntax = format_of("harmony").syntax
    assert syntax.thought is not None
    call = FORMS["harmony"].write_calls
    assert call is not None
    said = "".join(piece for piece, _ in pieces(call([("write", {"path": "x", "size": 1})])))
    said = said.removeprefix("<|start|>assistant").removesuffix("<|call|>")
    thought = f"{syntax.thought[0]}Well, <that>.{syntax.thought[1]}"
    for reply in (said, thought + said, thought + thought + said):
        token_ids = tokenizer(special).encode(reply, add_special_tokens=False)
        grammar = written("harmony", ToolChoice(TOOLS, must_call=True), special)
        assert matcher(grammar, special).num_allowed(token_ids) == len(token_ids), reply


# Further ways to write calls that are read: a call that must be made is written in the first of the form's own.
HAVE_OTHER_FORMS = {"Llama, tagged", "Llama's Python", "Cohere", "Solar"}


@pytest.mark.parametrize("special", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("name", [name for name in WRITTEN if format_of(name).syntax.trigger])
def test_text_is_free_until_a_call_begins(name: str, special: bool) -> None:
    form, trigger = FORMS[name], format_of(name).syntax.trigger
    assert form.write_calls is not None
    own = tokenizer(special)
    offered = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    grammar = written(name, ToolChoice(offered), special)
    text = f"Any <text> [1] {{\n{trigger[:-1]}, "
    free = own.encode(text, add_special_tokens=False)
    assert matcher(grammar, special).num_allowed(free) == len(free)
    for seed in range(2):
        begun = own.encode(text + trigger, add_special_tokens=False)
        token_ids = random_reply(matcher(grammar, special), own, seed, begun=begun)
        if token_ids[-1] != 0:
            continue
        calls, content, reader = read(name, token_ids, special, offered)
        said = own.decode(token_ids, skip_special_tokens=False)
        assert calls, said
        assert not reader.broken_call, said
        assert "".join(content).startswith(text[:-5]), said
        for call in calls:
            is_valid(call, offered)


@pytest.mark.parametrize("name", ["JSON in <tool_call>", "harmony", "Llama"])
def test_a_reply_is_a_call_or_an_answer_in_its_form(name: str) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    offered = tools(PARAMETERS[2])
    answer = Grammar.json_schema(json.dumps(schema))
    syntax = format_of(name).syntax
    assert can_be_kept(syntax, ToolChoice(offered), has_answer=True)
    kinds = set()
    for seed in range(12):
        grammar = grammar_of(syntax, ToolChoice(offered), tokenizer(True).special_tokens, answer)
        token_ids = some_reply(grammar, True, seed)
        if token_ids[-1] != 0:
            continue
        calls, content, _ = read(name, token_ids, True, offered)
        kinds.add(bool(calls))
        if not calls:
            jsonschema.validate(json.loads("".join(content)), schema)
    assert kinds == {True, False}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Qwen3-Coder", {"properties": {"a b": {}}}, "'a b' cannot be written"),
    ("Qwen3-Coder", {"properties": {"a": {"type": "string", "format": "date"}}}, "'format' cannot be enforced"),
    ("Qwen3-Coder", {"properties": {"a": {}}, "minProperties": 1}, "'minProperties' cannot be enforced"),
    ("Qwen3-Coder", {"properties": {"a": {}}, "required": ["b"]}, "requires 'b'"),
    ("Qwen3-Coder", {"properties": {"a": {"$ref": "#/$defs/b"}}}, "there is no '#/$defs/b'"),
    ("Qwen3-Coder", {"properties": {"a": {"$ref": "#/properties/a"}}}, "lead to each other"),
    (
        "Qwen3-Coder",
        {"properties": {"a": {"anyOf": [{"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 1}]}]}}},
        "'minimum' cannot be enforced",
    ),
    ("Qwen3-Coder", {"properties": {"a": {"enum": 5}}}, "not a JSON schema"),
    ("Gemma 4", {"properties": {"a": {"type": "object", "patternProperties": {}}}}, "'patternProperties' cannot be"),
    ("Gemma 4", {"properties": {"a": {"type": "array", "uniqueItems": True}}}, "'uniqueItems' cannot be enforced"),
    ("LFM2", {"properties": {"a-b": {}}}, "'a-b' cannot be written"),
]


@pytest.mark.parametrize(("name", "parameters", "why"), REFUSED, ids=str)
def test_what_cannot_be_enforced_is_refused_by_name(name: str, parameters: dict[str, Any], why: str) -> None:
    with pytest.raises(ApiError, match=re.escape(why)) as refused:
        written(name, ToolChoice(tools(parameters), must_call=True), False)
    assert refused.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=20)
@given(data=st.data())
def test_any_parameters_have_a_grammar_or_are_refused(name: str, data: st.DataObject) -> None:
    values = st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.text(max_size=3)
        | st.sampled_from(["string", "object", "#/$defs/a"]),
        lambda each: st.lists(each, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), each, max_size=4),
        max_leaves=12,
    )
    parameters = data.draw(st.dictionaries(st.sampled_from(KEYWORDS), values, max_size=4))
    choice = ToolChoice(tools(parameters, strict=data.draw(st.booleans())), must_call=True)
    try:
        grammar = written(name, choice, False)
        matcher(grammar, False)
    except ApiError as error:
        assert str(error).startswith("tools[0].function.parameters: ")
    except InvalidRequestError as error:
        assert error.reason == "BAD_GRAMMAR"


KEYWORDS = (
    *("type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf", "$ref", "$defs", "a", "pattern"),
    *("minLength", "maxLength", "minItems", "maxItems", "additionalProperties", "description", "minimum"),
)


@pytest.mark.parametrize("written_as", [r"a/b", r"a\/b", r"a\\/b", r"[/]b"])
def test_slashes_of_patterns_are_slashes(written_as: str) -> None:
    schema = {"properties": {"p": {"type": "string", "pattern": f"^{written_as}$"}}, "required": ["p"]}
    offered = tools(schema)
    token_ids = some_reply(written("Qwen3-Coder", ToolChoice(offered, must_call=True), False), False, 1)
    calls, _, _ = read("Qwen3-Coder", token_ids, False, offered)
    assert calls
    for call in calls:
        is_valid(call, offered)


def test_annotations_are_left_out_and_properties_of_their_names_stay() -> None:
    named = {"title": {"type": "string", "title": "A"}, "description": {"enum": [{"title": 1}]}}
    schema = {"title": "T", "properties": named, "required": ["title"], "allOf": [{"description": "D", "minimum": 1}]}
    assert without_annotations(schema) == {
        "properties": {"title": {"type": "string"}, "description": {"enum": [{"title": 1}]}},
        "required": ["title"],
        "allOf": [{"minimum": 1}],
    }


def test_references_that_branch_take_no_longer() -> None:
    doubled = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    schema = {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": {**doubled, "d60": {"type": "string"}}}
    for name in ("Qwen3-Coder", "Gemma 4"):
        matcher(written(name, ToolChoice(tools(schema), must_call=True), False), False)


def test_a_grammar_that_grows_with_each_argument_is_refused() -> None:
    large = {"enum": [f"{i:08}" for i in range(1000)]}
    schema = {"properties": {f"a{i}": {"type": "integer", "minimum": i} for i in range(100)}, "$defs": {"a": large}}
    with pytest.raises(ApiError, match="more than 65536 bytes"):
        written("GLM", ToolChoice(tools(schema), must_call=True), False)

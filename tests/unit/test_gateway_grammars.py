"""Forms of texts that HTTP requests ask for, as the grammars that the coordinator gets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.chat.request import ChatFields
from gateway.completions.request import CompletionFields
from gateway.fields import Defaults, validated
from gateway.generation import RequestedGeneration
from gateway.http.errors import ApiError
from gateway.http.json_body import parse_object
from gateway.reply.forms import REASONING
from gateway.responses.request import ResponseFields, shown_fields
from gateway.served_model import Asked, KnownModel, ModelCard
from gateway.wording import field_of, in_http_words, to_api_error
from specd.client.protocol.wire import to_request
from specd.errors import InvalidRequestError
from specd.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind, SessionGrammar
from specd.matching.matcher import SessionMatcher
from specd.v1 import generation_pb2, sampling_pb2
from tests.unit.test_session_matcher import EOS, tokenizer, vocabulary

DEFAULTS = Defaults(max_tokens=10)
# Properties that are not in the order of the alphabet, a float that is whole, and an integer beyond a double.
SCHEMA = {
    "type": "object",
    "properties": {"zeta": {"type": "number", "minimum": 2.0}, "alpha": {"enum": [None, 12345678901234567890]}},
    "required": ["zeta", "alpha"],
}
SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":"))
OF_SCHEMA = sampling_pb2.Grammar(json_schema=SCHEMA_TEXT)
OF_OBJECT = sampling_pb2.Grammar()
OF_OBJECT.json_object.SetInParent()
OF_REGEX, OF_LARK = sampling_pb2.Grammar(regex="[a-c]+"), sampling_pb2.Grammar(lark='start: "x"')
OF_CHOICE = sampling_pb2.Grammar(regex=r"a\.b|\(c")
NAMED = {"name": "answer", "description": "The answer.", "schema": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": {"name": "f"}}

FORMS: list[tuple[dict[str, Any], str, sampling_pb2.Grammar]] = [
    ({"guided_json": SCHEMA}, "guided_json", OF_SCHEMA),
    ({"guided_json": SCHEMA_TEXT}, "guided_json", OF_SCHEMA),
    ({"guided_regex": "[a-c]+"}, "guided_regex", OF_REGEX),
    ({"guided_grammar": 'start: "x"'}, "guided_grammar", OF_LARK),
    ({"guided_choice": ["a.b", "(c"]}, "guided_choice", OF_CHOICE),
    ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", OF_SCHEMA),
    ({"structured_outputs": {"json": SCHEMA_TEXT, "regex": None}}, "structured_outputs.json", OF_SCHEMA),
    ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", OF_OBJECT),
    ({"structured_outputs": {"regex": "[a-c]+"}}, "structured_outputs.regex", OF_REGEX),
    ({"structured_outputs": {"grammar": 'start: "x"', "disable_any": False}}, "structured_outputs.grammar", OF_LARK),
    ({"structured_outputs": {"choice": ["a.b", "(c"]}}, "structured_outputs.choice", OF_CHOICE),
]  # fmt: skip
FORMATS: list[tuple[dict[str, Any], sampling_pb2.Grammar]] = [
    ({"type": "json_object"}, OF_OBJECT),
    ({"type": "json_schema", "json_schema": NAMED}, OF_SCHEMA),
    ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}, OF_SCHEMA),
    ({"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}, OF_SCHEMA),
]


def chat(**body: Any) -> RequestedGeneration:
    fields = parse_object(json.dumps({"messages": [{"role": "user", "content": "x"}], **body}).encode())
    return validated(ChatFields, fields).chat_generation(1, DEFAULTS)


def completion(**body: Any) -> RequestedGeneration:
    fields = parse_object(json.dumps({"prompt": ["x", "y"], **body}).encode())
    first, second = validated(CompletionFields, fields).generations(1, DEFAULTS)
    assert first.options.get("grammar") == second.options.get("grammar")
    return second


def response(**body: Any) -> RequestedGeneration:
    fields = validated(ResponseFields, parse_object(json.dumps({"input": "x", **body}).encode()))
    fields.ignored()
    return fields.response_generation(1, DEFAULTS)


ENDPOINTS = [chat, completion, response]


def message_of(generation: RequestedGeneration) -> generation_pb2.GenerateRequest:
    return to_request(generation.prompt, generation.options)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(("body", "name", "expected"), FORMS)
def test_each_of_vllms_fields_is_a_grammar(
    endpoint: Any, body: dict[str, Any], name: str, expected: sampling_pb2.Grammar
) -> None:
    generation = endpoint(**body)
    assert generation.grammar_field == name
    assert message_of(generation).grammar == expected


@pytest.mark.parametrize(("form", "expected"), FORMATS)
def test_each_of_openais_formats_is_a_grammar(form: dict[str, Any], expected: sampling_pb2.Grammar) -> None:
    for endpoint in (chat, completion):
        assert message_of(endpoint(response_format=form)).grammar == expected
    beside = {"type": form["type"], **form.get("json_schema", {})}
    assert message_of(response(text={"format": beside})).grammar == expected


@pytest.mark.parametrize(
    "body", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {"json": None}}, {"guided_json": None}]
)
def test_what_asks_for_no_form_has_no_grammar(body: dict[str, Any]) -> None:
    assert not message_of(chat(**body)).HasField("grammar")


@pytest.mark.parametrize(
    ("endpoint", "body", "param", "says"),
    [
        (chat, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        (chat, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema", "is missing"),
        (chat, {"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "not supported"),
        (chat, {"response_format": {"type": "json_object", "json_schema": NAMED}}, "response_format", "'json_schema'"),
        (chat, {"response_format": {"type": "structural_tag"}}, "response_format", "'structural_tag' is not known"),
        (chat, {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
         "response_format.json_schema.schema", "dictionary"),
        (response, {"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format", "'json_schema'"),
        (response, {"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "is missing"),
        (response, {"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        (chat, {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "leave it out"),
        (completion, {"guided_choice": []}, "guided_choice", "at least 1 item"),
        (completion, {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex and guided_choice"),
        (chat, {"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json", "response_format and"),
        (chat, {"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex",
         "structured_outputs.json and structured_outputs.regex"),
        (chat, {"tool_choice": "required"}, "tool_choice", "no tools"),
        (chat, {"tool_choice": "always", "tools": [TOOL]}, "tool_choice", "'always'"),
        (chat, {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice",
         "'g' is not one of the tools"),
        (chat, {"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice", "no name"),
        (chat, {"tool_choice": {"type": "custom"}, "tools": [TOOL]}, "tool_choice", "'custom'"),
        (chat, {"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, "tool_choice.allowed_tools", "is missing"),
        (response, {"tool_choice": {"type": "allowed_tools", "mode": "x", "tools": [{"name": "f"}]},
                    "tools": [{"type": "function", "name": "f"}]}, "tool_choice.allowed_tools.mode", "'x'"),
        (response, {"tool_choice": {"type": "web_search"}}, "tool_choice", "'web_search'"),
    ],
)  # fmt: skip
def test_what_cannot_be_one_form_is_refused_by_name(endpoint: Any, body: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(ApiError, match=says) as refused:
        endpoint(**body)
    assert refused.value.status == 400
    assert refused.value.param == param


def of_model(template: str, generation: RequestedGeneration) -> Asked:
    return KnownModel(ModelCard("m", 100, 100, "", template, {})).asked(generation, None)


@pytest.mark.parametrize(
    ("generation", "param"),
    [
        (chat(response_format={"type": "json_object"}, tools=[TOOL]), "response_format"),
        (chat(guided_regex="a", tools=[TOOL], tool_choice="auto"), "guided_regex"),
        (response(text={"format": {"type": "json_object"}}, tools=[{"type": "function", "name": "f"}]), "text.format"),
    ],
)
def test_a_form_is_refused_beside_tools_that_the_model_calls_in_an_unknown_form(
    generation: RequestedGeneration, param: str
) -> None:
    with pytest.raises(ApiError, match="leave out tools") as refused:
        of_model("", generation)
    assert refused.value.param == param
    grammar = of_model("<tool_call> tool_call.name", generation).generation.options["grammar"]
    assert grammar is not None and grammar.kind is GrammarKind.LARK


def test_tools_that_are_not_offered_are_no_hindrance() -> None:
    searching: Any = [{"type": "web_search"}]
    for generation in (
        chat(response_format={"type": "json_object"}, tools=[TOOL], tool_choice="none"),
        response(text={"format": {"type": "json_object"}}, tools=searching),
    ):
        assert of_model("", generation).generation.options["grammar"] == Grammar.json_object()


STRICT = {"type": "function", "function": {"name": "g", "strict": True}}


@pytest.mark.parametrize(
    ("choice", "has_grammar", "names"),
    [
        ("auto", False, "f"),
        ("required", True, "f"),
        ({"type": "function", "function": {"name": "f"}}, True, "f"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}, False, "f"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}}, True, "f"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}, True, "fg"),
        ("auto", True, "fg"),
        ("none", False, "fg"),
    ],
)
def test_calls_are_held_where_they_must_be(choice: Any, has_grammar: bool, names: str) -> None:
    tools = [TOOL, STRICT][: len(names)]
    known = of_model("<tool_call> tool_call.name", chat(tools=tools, tool_choice=choice))
    assert ("grammar" in known.generation.options) == has_grammar
    assert not known.free_calls


def test_strict_has_no_effect_where_nothing_marks_a_call() -> None:
    known = of_model("<|python_tag|>", chat(tools=[TOOL, STRICT]))
    assert "grammar" not in known.generation.options
    assert known.free_calls == [1]


def test_only_auto_and_none_are_taken_of_a_form_that_cannot_be_held() -> None:
    for choice in ("required", {"type": "allowed_tools", "allowed_tools": {"tools": [TOOL]}}):
        with pytest.raises(ApiError, match="use 'auto' or 'none'") as refused:
            of_model("<atem:function_calls> <|message|> to=self", chat(tools=[TOOL, STRICT], tool_choice=choice))
        assert refused.value.param == "tool_choice"


def test_a_response_repeats_its_format_as_it_came() -> None:
    form = {"type": "json_schema", **NAMED}
    shown = shown_fields(validated(ResponseFields, {"input": "x", "text": {"format": form}}))
    assert json.dumps(shown["text"]["format"]["schema"]) == json.dumps(SCHEMA)
    assert shown["text"]["format"] == form
    shown = shown_fields(validated(ResponseFields, {"input": "x", "text": {"format": {"type": "json_object"}}}))
    assert shown["text"] == {"format": {"type": "json_object"}}


def test_the_form_begins_behind_the_reasoning_of_a_model_that_reasons() -> None:
    markers = REASONING[0].markers
    card = ModelCard("m", 100, 100, "", f"{markers.start}{markers.end}", {})
    generation = KnownModel(card).asked(chat(response_format={"type": "json_object"}), None).generation
    sent = message_of(generation)
    assert (sent.stop.reasoning.begin, sent.stop.reasoning.end) == (markers.start, markers.end)
    assert sent.grammar == OF_OBJECT
    assert generation.choice(1).options["grammar"] == Grammar.json_object()


HARMONY, MUSE = "<|channel|> <|message|> <|start|>assistant", "<atem:function_calls> <|message|> to=self"


@pytest.mark.parametrize(
    ("template", "fields", "param"),
    [(HARMONY, {"stop": "x"}, "stop"), (MUSE, {}, "response_format"), (MUSE, {"tools": [TOOL]}, "response_format")],
)
def test_replies_in_channels_that_cannot_keep_a_form_are_refused(
    template: str, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as refused:
        of_model(template, chat(response_format={"type": "json_object"}, **fields))
    assert refused.value.param == param


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), min_size=1, max_size=4),
    st.data(),
)
def test_a_choice_allows_its_texts_and_no_others(texts: list[str], data: st.DataObject) -> None:
    session = SessionMatcher(vocabulary(), SessionGrammar(Grammar.choice(texts), 0))
    chosen = [*tokenizer().encode(data.draw(st.sampled_from(texts)), add_special_tokens=False), EOS]
    assert session.num_allowed(chosen) == len(chosen)
    other = data.draw(st.text(st.sampled_from(r"a.*+?()|[]{}^$#&-~\ "), min_size=1, max_size=3))
    if other not in texts:
        tokens = [*tokenizer().encode(other, add_special_tokens=False), EOS]
        assert session.num_allowed(tokens) < len(tokens)


@pytest.mark.parametrize("name", ["response_format", "text.format", "guided_json", "structured_outputs.json"])
@pytest.mark.parametrize(
    ("reason", "said", "expected", "is_of_field"),
    [
        (
            "BAD_GRAMMAR",
            'grammar.json_schema cannot be kept: Unimplemented keys: ["token_ids"] in a grammar',
            '{} cannot be kept: Unimplemented keys: ["token_ids"] in a grammar',
            True,
        ),
        ("OUT_OF_RANGE", "grammar.json_schema has 9 bytes: it must", "{} has 9 bytes: it must", True),
        ("CONTRADICTION", "the request has a grammar, but x has an encoder", "the request has {}, but x has", False),
        (
            "CONTRADICTION",
            "the request has a grammar and stop.ignore_eos, so nothing ends",
            "the request has {} and ignore_eos, so nothing ends",
            False,
        ),
    ],
)
def test_an_error_names_the_field_that_asked_for_the_form(
    name: str, reason: str, said: str, expected: str, is_of_field: bool
) -> None:
    words = in_http_words(reason, said, grammar=name)
    assert words.startswith(expected.format(name))
    assert field_of(words) == (name if is_of_field else None)


def test_the_coordinators_own_errors_are_those() -> None:
    """The words above are those that the coordinator says."""
    for grammar in (
        Grammar.json_schema("{"),
        Grammar.json_schema('{"not": {}}'),
        Grammar.regex("("),
        Grammar.lark("x"),
        Grammar.regex("a" * (MAX_GRAMMAR_BYTES + 1)),
        Grammar.lark(""),
    ):
        with pytest.raises(InvalidRequestError) as raised:
            vocabulary().compile(grammar)
        error = to_api_error(raised.value, grammar="guided_json")
        assert (error.status, error.param) == (400, "guided_json"), str(error)
        assert str(error).startswith("guided_json ")

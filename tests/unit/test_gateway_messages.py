"""Requests of Anthropic's clients, as the generations that the coordinator is asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.fields import Defaults, validated
from gateway.generation import RequestedGeneration
from gateway.http.errors import ApiError
from gateway.http.json_body import parse_object
from gateway.messages.request import CountFields, MessageFields
from gateway.served_model import Asked, KnownModel, ModelCard
from specd.text.chat import Chat

DEFAULTS = Defaults(max_tokens=10)
HELLO = {"role": "user", "content": "hello"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Zürich", "days": 2.0}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]}
SCHEMA = {"type": "object", "properties": {"zeta": {"type": "integer"}, "alpha": {"type": "string"}}}
TOOL = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}
SERVER_TOOL = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
SERVED = KnownModel(ModelCard("m", 100, 100, "specd_0", "<tool_call>tool_call.name{{ enable_thinking }}", {}))


def fields_of(**fields: Any) -> MessageFields:
    body = {"max_tokens": 5, "messages": [HELLO], **fields}
    return validated(MessageFields, parse_object(json.dumps(body).encode()))


def generation_of(**fields: Any) -> RequestedGeneration:
    request = fields_of(**fields)
    return request.message_generation(1, DEFAULTS, request.max_tokens)


def chat_of(**fields: Any) -> Chat:
    prompt = generation_of(**fields).prompt
    assert isinstance(prompt, Chat)
    return prompt


def asked_of(**fields: Any) -> Asked:
    request = fields_of(**fields)
    return SERVED.asked(request.message_generation(1, DEFAULTS, 5), request.effort, thinks=request.thinks)


def said(*messages: dict[str, Any], **fields: Any) -> list[Any]:
    return list(chat_of(messages=messages, **fields).messages)


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}


def thought(said: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": said, "signature": ""}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([HELLO], [HELLO]),
        ([user(text("a"), text("b"))], [{"role": "user", "content": "a\n\nb"}]),
        ([user()], [{"role": "user", "content": ""}]),
        ([HELLO, user(text("more"))], [{"role": "user", "content": "hello\n\nmore"}]),
        ([HELLO, assistant(text("a")), HELLO], [HELLO, {"role": "assistant", "content": "a"}, HELLO]),
        (
            [HELLO, assistant(thought("hm"), text("a")), HELLO],
            [HELLO, {"role": "assistant", "content": "a", "reasoning_content": "hm"}, HELLO],
        ),
        (
            [HELLO, assistant({"type": "redacted_thinking", "data": "x"}, text("a")), HELLO],
            [HELLO, {"role": "assistant", "content": "a"}, HELLO],
        ),
        (
            [user(text("before"), RESULT, text("behind"))],
            [
                {"role": "user", "content": "before"},
                {"role": "tool", "content": "sunny", "tool_call_id": "toolu_1"},
                {"role": "user", "content": "behind"},
            ],
        ),
        (
            [user({**RESULT, "content": "failed", "is_error": True}, {"type": "tool_result", "tool_use_id": "2"})],
            [
                {"role": "tool", "content": "failed", "tool_call_id": "toolu_1"},
                {"role": "tool", "content": "", "tool_call_id": "2"},
            ],
        ),
        (
            [HELLO, {"role": "system", "content": "100 tokens left"}],
            [{"role": "user", "content": "hello\n\n100 tokens left"}],
        ),
        ([{"role": "system", "content": "Be brief."}, HELLO], [{"role": "system", "content": "Be brief."}, HELLO]),
    ],
    ids=[
        *("text", "blocks", "empty", "two", "reply", "thinking", "redacted", "result", "error"),
        *("late system", "first system"),
    ],
)
def test_blocks_are_messages_as_templates_read_them(messages: list[Any], expected: list[Any]) -> None:
    assert said(*messages) == expected


def test_calls_keep_the_order_and_the_numbers_of_the_client() -> None:
    call, result = said(HELLO, assistant(text("Let me look."), CALL), user(RESULT))[1:]
    assert (call["content"], result["role"]) == ("Let me look.", "tool")
    (called,) = call["tool_calls"]
    assert json.dumps(called["function"], ensure_ascii=False) == (
        '{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2.0}}'
    )


def test_replies_that_follow_one_another_are_one() -> None:
    messages = said(HELLO, assistant(thought("a"), CALL), assistant(thought("b"), {**CALL, "id": "2"}), user(RESULT))
    assert messages[1]["reasoning_content"] == "a\n\nb"
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["toolu_1", "2"]


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("Be brief.", "Be brief."),
        ([text("Be brief."), text("Be kind.")], "Be brief.\n\nBe kind."),
        ([text("x-anthropic-billing-header: cch=1;"), text("Be brief.")], "Be brief."),
        ([], None),
        (None, None),
    ],
)
def test_a_system_prompt_comes_first(system: Any, expected: str | None) -> None:
    assert said(HELLO, system=system) == [*([{"role": "system", "content": expected}] if expected else []), HELLO]


def test_a_reply_that_has_begun_is_continued() -> None:
    chat = chat_of(messages=[HELLO, assistant(text("Hello,"))])
    assert chat.continue_final_message
    assert chat.messages[-1] == {"role": "assistant", "content": "Hello,"}
    assert not chat_of(messages=[HELLO]).continue_final_message


def test_tools_are_functions_in_the_order_of_the_client() -> None:
    chat = chat_of(tools=[SERVER_TOOL, {**TOOL, "cache_control": {"type": "ephemeral"}, "type": "custom"}])
    function = {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}
    assert json.dumps(chat.tools) == json.dumps([{"type": "function", "function": function}])


@pytest.mark.parametrize(
    ("choice", "must_call", "has_parallel_calls", "offered"),
    [
        (None, False, True, 1),
        ({"type": "auto"}, False, True, 1),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, False, 1),
        ({"type": "any"}, True, True, 1),
        ({"type": "tool", "name": "get_weather"}, True, False, 1),
        ({"type": "none"}, False, True, 0),
    ],
)
def test_a_choice_of_tools(choice: Any, must_call: bool, has_parallel_calls: bool, offered: int) -> None:
    fields = fields_of(tools=[TOOL], tool_choice=choice)
    tools = fields.chosen_tools
    assert (tools.must_call, tools.has_parallel_calls) == (must_call, has_parallel_calls)
    assert len(fields.offered_tools) == len(tools.tools) == offered


def test_a_schema_that_cannot_be_enforced_is_named_as_the_client_has_it() -> None:
    other = {"name": "other", "input_schema": {"type": "object"}}
    strict = {**TOOL, "strict": True, "input_schema": {"properties": {"a": {"$ref": "#/nowhere"}}}}
    request = fields_of(tools=[SERVER_TOOL, other, strict], tool_choice={"type": "tool", "name": "get_weather"})
    writes_tags = KnownModel(ModelCard("m", 100, 100, "specd_0", "<tool_call>\n<function=f>\n<parameter=a>", {}))
    with pytest.raises(ApiError, match=r"^tools\[2\]\.input_schema: there is no '#/nowhere'") as refused:
        writes_tags.asked(request.message_generation(1, DEFAULTS), None)
    assert refused.value.param == "tools[2].input_schema"
    with pytest.raises(ApiError, match=r"^tools\[1\]\.name is 'a b'"):
        asked_of(tools=[SERVER_TOOL, {**TOOL, "name": "a b"}], tool_choice={"type": "any"})


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"output_config": {"effort": "low"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}}, {"enable_thinking": False}),
        (
            {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False},
        ),
    ],
)
def test_thinking_is_a_variable_of_the_template(fields: dict[str, Any], arguments: dict[str, Any]) -> None:
    prompt = asked_of(**fields).generation.prompt
    assert isinstance(prompt, Chat)
    assert prompt.template_arguments == arguments


def test_a_template_that_reads_no_thinking_is_known() -> None:
    request = fields_of(thinking={"type": "enabled"}, output_config={"effort": "high"})
    silent = KnownModel(ModelCard("m", 100, 100, "specd_0", "{{ messages }}", {}))
    asked = silent.asked(request.message_generation(1, DEFAULTS), request.effort, thinks=request.thinks)
    assert (asked.reads_thinking, asked.reads_effort) == (False, False)


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    ],
)
def test_an_answer_keeps_its_schema(fields: dict[str, Any]) -> None:
    generation = generation_of(**fields)
    grammar = generation.options.get("grammar")
    assert grammar is not None
    assert json.loads(grammar.text) == SCHEMA
    assert list(json.loads(grammar.text)["properties"]) == ["zeta", "alpha"]
    assert generation.grammar_field == ("output_format" if "output_format" in fields else "output_config.format")


def test_sampling_has_the_names_of_anthropic_and_of_specd() -> None:
    options = generation_of(
        stop_sequences=["a", "b"], temperature=0.5, top_p=0.9, top_k=3, seed=7, num_draft_tokens=2
    ).options
    assert (options["stop"], options["temperature"], options["top_p"], options["top_k"]) == (["a", "b"], 0.5, 0.9, 3)
    assert options["num_draft_tokens"] == 2
    assert generation_of().options["temperature"] == 1
    assert generation_of(session_id="s1").session_id == "s1"


@pytest.mark.parametrize(("given", "cuts"), [({}, True), ({"cut_max_tokens": False}, False)])
def test_max_tokens_are_cut_unless_the_request_forbids_it(given: dict[str, Any], cuts: bool) -> None:
    generation = generation_of(max_tokens=32_000, **given)
    assert (generation.options["max_tokens"], generation.options["cut_max_tokens"]) == (32_000, cuts)


def test_fields_without_an_effect_are_named() -> None:
    fields = fields_of(
        metadata={"user_id": "me"},
        service_tier="standard_only",
        context_management={"edits": []},
        cache_control={"type": "ephemeral"},
        token_sources=True,
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": None, "task_budget": {"type": "tokens"}},
        tools=[TOOL, SERVER_TOOL],
    )
    assert fields.ignored() == [
        "context_management",
        "metadata",
        "output_config.task_budget",
        "service_tier",
        "thinking.budget_tokens",
        "token_sources",
        "tools[1]",
    ]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [user(IMAGE)]}, "messages[0].content[0]"),
        ({"messages": [user(text("x"), {"type": "document"})]}, "messages[0].content[1]"),
        ({"messages": [user({**RESULT, "content": [IMAGE]})]}, "messages[0].content[0].content[0]"),
        ({"messages": [user(thought("x"))]}, "messages[0].content[0]"),
        ({"messages": [user(CALL)]}, "messages[0].content[0]"),
        ({"messages": [{"role": "system", "content": [RESULT]}]}, "messages[0].content[0]"),
        ({"messages": [HELLO, assistant(RESULT)]}, "messages[1].content[0]"),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
        ({"messages": [user({"type": "tool_result"})]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [HELLO, assistant({"type": "tool_use", "id": "1"}), HELLO]}, "messages[1].content[0].name"),
        ({"messages": [HELLO, assistant({"type": "tool_use", "name": "f"}), HELLO]}, "messages[1].content[0].id"),
        ({"messages": [HELLO, assistant({"type": "thinking"}), HELLO]}, "messages[1].content[0].thinking"),
        ({"messages": [HELLO, assistant(text("x"), CALL)]}, "messages[1].content"),
        ({"messages": [HELLO, assistant(thought("x"))]}, "messages[1].content"),
        ({"system": [IMAGE]}, "system[0]"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop": "x"}, "stop"),
        ({"n": 2}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "text"}}, "output_format": {"type": "text"}}, "output_format"),
    ],
)
def test_a_field_that_cannot_be_kept_is_refused_by_its_name(change: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        generation_of(**change)
    assert refused.value.status == 400
    assert refused.value.param == param
    assert str(refused.value).startswith(param)


def test_a_count_needs_no_max_tokens() -> None:
    assert validated(CountFields, {"messages": [HELLO]}).message_generation(0, DEFAULTS)
    with pytest.raises(ApiError, match="max_tokens is missing"):
        validated(MessageFields, {"messages": [HELLO]})

"""Bodies of HTTP requests: what is refused before anything is done with it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from gateway.app import make_app
from gateway.chat.request import ChatFields
from gateway.completions.request import CompletionFields
from gateway.fields import Defaults, validated
from gateway.http.errors import ApiError
from gateway.http.json_body import MAX_DEPTH, parse_object
from gateway.reasoning_effort import with_effort
from gateway.responses.request import ResponseFields
from gateway.service import Service
from specd.client import AsyncClient
from specd.client.protocol.wire import to_request
from specd.gateway_settings import GatewaySettings
from specd.settings import load_settings
from specd.text.chat import Chat

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(), values, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4))
def test_an_object_is_read_as_it_is(value: dict[str, Any]) -> None:
    assert parse_object(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "the body is empty: send a JSON object"),
        (b" \n", "the body is empty"),
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a": 1, "a": 2}', 'duplicate key "a"'),
        (b'{"b": {"a": 1, "a": 1}}', 'duplicate key "a"'),
        (b'{"a": NaN}', "not JSON"),
        (b'{"a": -Infinity}', "not JSON"),
        (b'{"a": "\xff"}', "unicode"),
        (b'{"a": "\\ud800"}', "hex escape"),
        (b'{"\\udc00": 1}', "surrogate"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"a": ' + b"[" * 100_000, "nests deeper"),
        (b'{"a": ' + b'{"a":' * 100_000, "nests deeper"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_what_is_no_sound_object_is_refused(body: bytes, word: str) -> None:
    with pytest.raises(ApiError, match=word) as raised:
        parse_object(body)
    assert raised.value.status == 400
    assert len(str(raised.value)) < 500


def test_brackets_in_strings_are_no_depth() -> None:
    assert parse_object(b'{"a": "' + b"[" * 1000 + b'\\"["}')["a"].endswith('"[')
    nested = b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1)
    assert parse_object(b'{"a": ' + nested + b', "b": ' + nested + b"}")


def test_a_surrogate_pair_is_a_character() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "\N{GRINNING FACE}"}


DEFAULTS = Defaults(max_tokens=10)
MESSAGES = [{"role": "user", "content": "x"}]


@given(st.dictionaries(st.sampled_from(sorted(ChatFields.model_fields)), JSON_VALUES))
def test_fields_of_any_kind_are_taken_or_named(fields: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, **fields}
    try:
        taken = validated(ChatFields, body)
    except ApiError as error:
        assert error.status == 400
        assert error.param is not None
        assert error.param.split(".")[0].split("[")[0] in fields
    else:
        try:
            taken.chat_generation(1, DEFAULTS)
        except ApiError as error:
            assert error.param in fields or str(error.param).startswith("messages")


@pytest.mark.parametrize("name", ["temperature", "seed", "n", "stop", "tools", "logit_bias", "stream", "prediction"])
def test_null_is_the_same_as_nothing(name: str) -> None:
    given_null = validated(ChatFields, {"messages": MESSAGES, name: None})
    assert given_null.chat_generation(1, DEFAULTS) == validated(ChatFields, {"messages": MESSAGES}).chat_generation(
        1, DEFAULTS
    )


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**64 - 1, 0])
def test_each_seed_of_openai_is_one(seed: int) -> None:
    assert validated(ChatFields, {"messages": MESSAGES, "seed": seed}).seed == seed


@pytest.mark.parametrize(
    "penalties",
    [{"repetition_penalty": 1.3}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.3, "frequency_penalty": 1e-6}],
    ids=["repetition", "presence", "two"],
)
def test_each_penalty_looks_at_the_whole_text_by_itself(penalties: dict[str, float]) -> None:
    fields = validated(ChatFields, {"messages": MESSAGES, **penalties})
    assert fields.chat_generation(1, DEFAULTS).options["penalty_context_size"] == 0
    fields = validated(ChatFields, {"messages": MESSAGES, **penalties, "penalty_context_size": 20})
    assert fields.chat_generation(1, DEFAULTS).options["penalty_context_size"] == 20


@pytest.mark.parametrize(
    ("given", "option", "field", "cuts"),
    [
        (None, False, None, True),
        (7, False, None, False),
        (7, True, None, True),
        (7, False, True, True),
        (7, True, False, False),
        (None, True, False, True),
    ],
)
def test_max_tokens_are_cut_if_the_field_says_so_or_the_option(
    given: int | None, option: bool, field: bool | None, cuts: bool
) -> None:
    defaults = Defaults(max_tokens=10, cut_max_tokens=option)
    body = {"max_tokens": given, "cut_max_tokens": field}
    asked = [
        validated(ChatFields, {"messages": MESSAGES, **body}).chat_generation(1, defaults),
        validated(CompletionFields, {"prompt": "x", **body}).generations(1, defaults)[0],
        validated(
            ResponseFields, {"input": "x", "max_output_tokens": given, "cut_max_tokens": field}
        ).response_generation(1, defaults),
    ]
    assert [generation.options["cut_max_tokens"] for generation in asked] == [cuts] * 3
    assert [generation.options["max_tokens"] for generation in asked] == [given or 10, given or 16, given or 10]
    assert [generation.is_max_tokens_given for generation in asked] == [given is not None] * 3


CHAT_DEFAULTS: dict[str, Any] = {
    "model": None,
    "logprobs": 0,
    "top_logprobs": 0,
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "continue_final_message": False,
    "add_special_tokens": False,
    "echo": False,
    "reasoning_effort": None,
    "functions": None,
    "modalities": ["text"],
}
# What clients of OpenAI and vLLM send where they ask for nothing.
NEUTRAL: dict[str, Any] = {
    **{"top_k": -1, "min_p": 0, "repetition_penalty": 1, "n": 1, "best_of": 1, "stop": [], "stop_token_ids": []},
    **{"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "min_tokens": 0, "ignore_eos": False},
    **{"use_beam_search": False, "length_penalty": 1.0, "include_stop_str_in_output": False, "bad_words": []},
    **{"skip_special_tokens": True, "spaces_between_special_tokens": True, "prompt_logprobs": None, "seed": None},
    **{"truncate_prompt_tokens": None, "guided_json": None, "structured_outputs": None, "allowed_token_ids": None},
    **{"parallel_tool_calls": True, "service_tier": "auto", "store": False, "metadata": {}, "user": None},
    **{"stream_options": None, "priority": 0, "return_token_ids": False, "top_p": 1, "temperature": 1.0},
}


def test_values_that_ask_for_nothing_are_taken_and_not_named() -> None:
    chat = validated(ChatFields, {"messages": MESSAGES, **NEUTRAL, **CHAT_DEFAULTS})
    completion = validated(CompletionFields, {"prompt": "x", **NEUTRAL, "logprobs": False, "suffix": "", "echo": False})
    response = validated(ResponseFields, {"input": "x", **NEUTRAL, "truncation": "disabled", "conversation": None})
    assert chat.ignored() == completion.ignored() == response.ignored() == []
    plain = {"temperature": 1.0, "top_p": 1, "repetition_penalty": 1.0}
    asked = validated(ChatFields, {"messages": MESSAGES, **plain})
    (sent, expected) = (
        to_request(each.chat_generation(1, DEFAULTS).prompt, each.chat_generation(1, DEFAULTS).options)
        for each in (chat, asked)
    )
    assert sent.sampling.min_p == 0
    assert sent == expected
    assert completion.generations(1, DEFAULTS)[0].options["top_log_probabilities"] is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 3),
        ("use_beam_search", True),
        ("length_penalty", 0.5),
        ("skip_special_tokens", False),
        ("include_stop_str_in_output", True),
        ("guided_whitespace_pattern", " ?"),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [1]),
        ("prompt_logprobs", 0),
        ("truncate_prompt_tokens", -1),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
    ],
)
def test_values_that_would_change_the_text_are_refused_by_name(name: str, value: Any) -> None:
    for cls, body in (
        (ChatFields, {"messages": MESSAGES}),
        (CompletionFields, {"prompt": "x"}),
        (ResponseFields, {"input": "x"}),
    ):
        with pytest.raises(ApiError, match=f"^{name} is not supported: ") as refused:
            validated(cls, {**body, name: value}).ignored()
        assert refused.value.status == 400
        assert refused.value.param == name


def test_fields_that_change_nothing_are_named() -> None:
    fields = validated(
        ChatFields, {"messages": MESSAGES, "user": "me", "store": True, "service_tier": "flex", "x": None}
    )
    assert fields.ignored() == ["service_tier", "store", "user"]


def test_as_many_of_the_best_as_are_wanted_are_all() -> None:
    assert validated(CompletionFields, {"prompt": "x", "n": 3, "best_of": 3}).ignored() == []


@pytest.mark.parametrize("top_p", [0, 0.0, 1e-9])
def test_a_top_p_of_nothing_is_greedy(top_p: float) -> None:
    generation = validated(ChatFields, {"messages": MESSAGES, "top_p": top_p}).chat_generation(1, DEFAULTS)
    assert (generation.options["temperature"], generation.options["top_p"]) == (0.0, None)


def test_ids_and_types_that_are_null_are_left_out() -> None:
    call = {"id": None, "type": None, "function": {"name": "f", "arguments": None}}
    body = {"messages": [*MESSAGES, {"id": None, "role": "assistant", "content": None, "tool_calls": [call]}]}
    prompt = validated(ChatFields, body).chat_generation(1, DEFAULTS).prompt
    assert isinstance(prompt, Chat)
    (said,) = prompt.messages[1]["tool_calls"]
    assert said["function"] == {"name": "f", "arguments": {}}
    items = [{"id": None, "type": None, "role": "user", "content": "x"}]
    assert validated(ResponseFields, {"input": items}).response_generation(1, DEFAULTS)


@pytest.mark.parametrize(
    ("template", "effort", "read"),
    [
        ("{{ reasoning_effort }}", "low", {"reasoning_effort": "low"}),
        ("{% if enable_thinking %}", "low", {"enable_thinking": True}),
        ("{% if enable_thinking %}", "none", {"enable_thinking": False}),
        (
            "{{ reasoning_effort }}{{ enable_thinking }}",
            "minimal",
            {"reasoning_effort": "minimal", "enable_thinking": True},
        ),
        ("{{ messages }}", "high", {}),
        ("{{ my_reasoning_effort }}", "high", {}),
    ],
)
def test_an_effort_is_a_variable_of_the_template_that_reads_it(
    template: str, effort: Any, read: dict[str, Any]
) -> None:
    chat = validated(ChatFields, {"messages": MESSAGES, "reasoning_effort": effort})
    response = validated(ResponseFields, {"input": "x", "reasoning": {"effort": effort, "summary": "auto"}})
    assert response.ignored() == ["reasoning.summary"]
    for fields, generation in (
        (chat, chat.chat_generation(1, DEFAULTS)),
        (response, response.response_generation(1, DEFAULTS)),
    ):
        asked, is_read = with_effort(generation, fields.reasoning_effort, template)
        assert isinstance(asked.prompt, Chat)
        assert asked.prompt.template_arguments == read
        assert is_read == bool(read)


def test_what_a_request_sets_itself_stays() -> None:
    body = {"messages": MESSAGES, "reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    fields = validated(ChatFields, body)
    generation, _ = with_effort(fields.chat_generation(1, DEFAULTS), fields.reasoning_effort, "{{ enable_thinking }}")
    assert isinstance(generation.prompt, Chat)
    assert generation.prompt.template_arguments == {"enable_thinking": True}


def test_an_effort_that_is_none_of_openais_is_refused() -> None:
    with pytest.raises(ApiError, match=r"^reasoning_effort: "):
        validated(ChatFields, {"messages": MESSAGES, "reasoning_effort": "huge"})


def test_tools_and_arguments_stay_as_the_client_wrote_them() -> None:
    arguments = {"pattern": "def", "include": "*.py", "channel": 1234567890123456789, "ratio": 2.0}
    function = {"parameters": {"b": {"type": "null"}, "a": [2.0, None]}, "strict": True, "name": "grep"}
    called = {"function": {"arguments": json.dumps(arguments), "name": "grep"}, "id": "1"}
    body = {
        "messages": [*MESSAGES, {"role": "assistant", "tool_calls": [called]}],
        "tools": [{"function": {**function, "description": None}, "type": "function"}],
        "chat_template_kwargs": {"z": 2.0, "a": 2**63},
    }
    fields = validated(ChatFields, parse_object(json.dumps(body).encode()))
    prompt = fields.chat_generation(1, Defaults(max_tokens=10)).prompt
    assert isinstance(prompt, Chat)
    assert json.dumps(prompt.tools) == json.dumps([{"function": function, "type": "function"}])
    assert json.dumps(prompt.messages[-1]["tool_calls"][0]["function"]["arguments"]) == json.dumps(arguments)
    assert json.dumps(prompt.template_arguments) == '{"z": 2.0, "a": 9223372036854775808}'


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity"])
def test_a_number_that_no_double_holds_is_refused(number: str) -> None:
    with pytest.raises(ApiError, match=r"is not JSON|beyond a double \(-?inf in 'a'\)") as raised:
        parse_object(f'{{"a": [{number}]}}'.encode())
    assert raised.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"temperature": 200}, "temperature: it must be 0 (greedy) or in [0.01, 100] (got 200)"),
        ({"top_p": 2}, "top_p: it must be less than or equal to 1 (got 2)"),
        ({"stop": ["x"] * 65}, "stop: List should have at most 64 items, not 65 (got ["),
    ],
)
def test_a_wrong_field_is_named_in_plain_words(body: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError) as raised:
        validated(ChatFields, {"messages": MESSAGES, **body})
    assert str(raised.value).startswith(says)


@pytest.mark.parametrize(("method", "path", "allowed"), [("GET", "completions", "POST"), ("POST", "models", "GET")])
async def test_a_wrong_method_says_which_is_right(method: str, path: str, allowed: str) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    scope: dict[str, Any] = {
        **{"type": "http", "method": method, "path": f"/v1/{path}", "query_string": b"", "scheme": "http"},
        **{"headers": [(b"host", b"127.0.0.1")], "server": ("127.0.0.1", 80)},
    }
    async with AsyncClient("127.0.0.1:1") as coordinator:
        await make_app(Service(coordinator, load_settings(GatewaySettings, {})), CollectorRegistry())(
            scope, receive, send
        )
    assert sent[0]["status"] == 405
    assert allowed in dict(sent[0]["headers"])[b"allow"].decode()
    said = json.loads(sent[1]["body"])["error"]["message"]
    assert said.startswith(f"{method} /v1/{path}: the method is not allowed: use {allowed}")

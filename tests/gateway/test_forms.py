"""Texts in the form that a request asks for, through the gateway: the included model knows only Python."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import pytest
from jsonschema import validate
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel, Field

from specd.v1.sampling_pb2 import Grammar, SamplingParameters
from tests.e2e.calls import responses_to
from tests.e2e.chats import QUESTION, chat_of
from tests.gateway.http_client import HttpClient
from tests.raw_client import RawClient

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
# The properties are not in the order of the alphabet.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "colour": {"enum": ["red", "green"]},
        "both": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
    },
    "required": ["title", "count", "colour", "both"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 400}
MESSAGES = {"messages": [QUESTION], **SAMPLED}


class Thing(BaseModel):
    """As openai-python's users write it."""

    title: str = Field(max_length=12)
    colour: Literal["red", "green"]
    both: tuple[bool, bool]
    again: bool | None


def is_thing(text: str) -> None:
    value = json.loads(text)
    validate(value, SCHEMA)
    assert list(value) == [*SCHEMA["properties"]]


async def content_of(http: HttpClient, **body: Any) -> str:
    response = await http.post(CHAT, {**MESSAGES, **body})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    content: str = choice["message"]["content"]
    return content


async def test_a_reply_keeps_its_schema_with_its_properties_in_order(http: HttpClient, grpc_client: RawClient) -> None:
    text = await content_of(http, response_format=FORMAT)
    is_thing(text)
    assert await content_of(http, response_format=FORMAT, num_draft_tokens=0) == text
    chunks = await http.chunks(CHAT, {**MESSAGES, "response_format": FORMAT})
    assert "".join(choice["delta"].get("content") or "" for each in chunks for choice in each["choices"]) == text
    call = grpc_client.generate(
        chat_of([QUESTION]),
        sampling=SamplingParameters(temperature=1.0, seed=5, penalty_context_size=0),
        max_tokens=400,
        grammar=Grammar(json_schema=json.dumps(SCHEMA)),
    )
    assert "".join(response.text for response in await responses_to(call)) == text


async def test_each_choice_keeps_it(http: HttpClient) -> None:
    body = {**MESSAGES, "response_format": FORMAT, "n": 3}
    texts = [choice["message"]["content"] for choice in (await http.post(CHAT, body)).json()["choices"]]
    assert len(set(texts)) == 3
    for text in texts:
        is_thing(text)


async def test_completions_and_responses_keep_it_too(http: HttpClient) -> None:
    completions = await http.post(COMPLETIONS, {"prompt": ["def", "x = "], "response_format": FORMAT, **SAMPLED})
    for choice in completions.json()["choices"]:
        is_thing(choice["text"])
        assert choice["finish_reason"] == "stop"
    form = {"type": "json_schema", "name": "thing", "schema": SCHEMA, "strict": True}
    sampled = {"temperature": 1.0, "seed": 5, "max_output_tokens": 400}
    response = (await http.post(RESPONSES, {"input": "x", "text": {"format": form}, **sampled})).json()
    assert response["status"] == "completed"
    assert response["text"]["format"] == {**form, "description": None}
    is_thing(response["output"][0]["content"][0]["text"])


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"response_format": {"type": "json_object"}, "logit_bias": {}}, r"\{(.|\n)*"),
        ({"guided_regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
        ({"guided_choice": ["yes (a.b)", "no|never"]}, r"yes \(a\.b\)|no\|never"),
        ({"guided_grammar": 'start: "if " NAME ":"\nNAME: /[a-z]{1,5}/'}, "if [a-z]{1,5}:"),
        ({"guided_json": {"enum": ["one", 2]}}, '"one"|2'),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
    ],
)
async def test_each_kind_of_form_is_kept(http: HttpClient, body: dict[str, Any], pattern: str) -> None:
    response = await http.post(CHAT, {**MESSAGES, **body})
    assert response.status_code == 200, response.text
    assert re.fullmatch(pattern, response.json()["choices"][0]["message"]["content"])


async def test_openai_python_parses_a_class(openai: AsyncOpenAI) -> None:
    messages: Any = [QUESTION]
    completion = await openai.chat.completions.parse(
        model="pycode", messages=messages, response_format=Thing, temperature=1.0, seed=5
    )
    assert isinstance(completion.choices[0].message.parsed, Thing)
    response = await openai.responses.parse(
        model="pycode", input="x", text_format=Thing, temperature=1.0, extra_body={"seed": 5}
    )
    assert isinstance(response.output_parsed, Thing)


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (CHAT, {"guided_json": {"not": {"type": "string"}}}, "guided_json", "not"),
        (CHAT, {"response_format": {**FORMAT, "json_schema": {"schema": {"type": "nothing"}}}}, "response_format", ""),
        (CHAT, {"guided_regex": "("}, "guided_regex", "unclosed group"),
        (CHAT, {"guided_json": "{"}, "guided_json", "JSON"),
        (CHAT, {"guided_json": {"const": "x" * 2**16}}, "guided_json", "65536"),
        (COMPLETIONS, {"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "cannot be kept"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format", "not"),
        (CHAT, {"guided_regex": "a", "ignore_eos": True}, None, "the request has guided_regex and ignore_eos"),
    ],
)
async def test_a_form_that_cannot_be_kept_is_refused_by_its_field(
    http: HttpClient, path: str, body: dict[str, Any], param: str | None, says: str
) -> None:
    prompt: dict[str, Any] = {CHAT: {"messages": [QUESTION]}, COMPLETIONS: {"prompt": "x"}, RESPONSES: {"input": "x"}}
    refused = await http.post(path, {**prompt[path], **body})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == param
    assert says in error["message"]
    assert len(error["message"]) < 500


async def test_other_parameters_that_forbid_all_of_it_end_the_text_with_400(http: HttpClient) -> None:
    refused = await http.post(CHAT, {**MESSAGES, "guided_regex": "ab", "min_tokens": 50})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "guided_regex"
    assert refused.json()["error"]["message"].startswith("guided_regex forbids ")


async def test_a_form_beside_tools_says_what_to_leave_out(openai: AsyncOpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    messages: Any = [QUESTION]
    form: Any = FORMAT
    with pytest.raises(BadRequestError, match="leave out tools") as refused:
        await openai.chat.completions.create(model="pycode", messages=messages, tools=tools, response_format=form)
    assert refused.value.param == "response_format"

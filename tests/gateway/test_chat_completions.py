"""POST /v1/chat/completions in OpenAI's shapes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from openai import AsyncOpenAI

from specd.v1.generation_pb2 import StopConditions
from specd.v1.sampling_pb2 import SamplingParameters
from tests.e2e.calls import responses_to
from tests.e2e.chats import QUESTION, SYSTEM, chat_of
from tests.gateway.http_client import HttpClient
from tests.raw_client import RawClient
from tests.thorough import examples

PATH = "/v1/chat/completions"
MESSAGES = [SYSTEM, QUESTION]
SAMPLED = {"messages": MESSAGES, "temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 24, "ignore_eos": True}


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def test_the_same_seed_gives_the_same_tokens_over_grpc_and_http(grpc_client: RawClient, http: HttpClient) -> None:
    sampling = SamplingParameters(temperature=0.9, top_p=0.95, seed=7)
    stop = StopConditions(ignore_eos=True)
    call = grpc_client.generate(chat_of(MESSAGES), sampling=sampling, max_tokens=24, stop=stop)
    responses = await responses_to(call)
    tokens = [(token.id, token.text) for response in responses for token in response.tokens]
    text = "".join(response.text for response in responses)
    assert text

    whole = (await http.post(PATH, {**SAMPLED, "token_sources": True})).json()
    (choice,) = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert [(token["id"], token["text"]) for token in choice["tokens"]] == tokens
    assert {token["source"] for token in choice["tokens"]} <= {"target", "draft", "lookup"}

    chunks = await http.chunks(PATH, {**SAMPLED, "num_draft_tokens": 0})
    assert text_of(chunks) == text


async def test_chunks_have_the_shapes_that_clients_read(http: HttpClient) -> None:
    chunks = await http.chunks(PATH, {**SAMPLED, "stream_options": {"include_usage": True}})
    heads = {(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}
    ((chat_id, _, model, kind),) = heads
    assert chat_id.startswith("chatcmpl-")
    assert (model, kind) == ("pycode", "chat.completion.chunk")
    *generated, last, usage = chunks
    assert generated[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert all(chunk["choices"][0]["delta"].keys() == {"content"} for chunk in generated[1:])
    assert all(chunk["choices"][0]["finish_reason"] is None and chunk["usage"] is None for chunk in generated)
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]
    assert last["timings"]["predicted_n"] == 24
    assert last["timings"]["draft_n"] >= last["timings"]["draft_n_accepted"]
    assert last["timings"]["predicted_per_second"] > 0
    assert last["timings"]["near_ties"] == 0
    assert last["timings"]["smallest_margin"] > 0
    assert 0 <= last["timings"]["smallest_margin_position"] < 24
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 24
    assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + 24
    assert "accepted_prediction_tokens" not in usage["usage"]["completion_tokens_details"]


async def test_without_the_option_there_is_no_usage(http: HttpClient) -> None:
    chunks = await http.chunks(PATH, SAMPLED)
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


async def test_choices_differ_and_are_the_same_each_time(http: HttpClient) -> None:
    body = {**SAMPLED, "temperature": 1.0, "n": 4}
    first, again = [(await http.post(PATH, body)).json() for _ in range(2)]
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert texts == [choice["message"]["content"] for choice in again["choices"]]
    assert first["usage"]["completion_tokens"] == 4 * 24

    alone = (await http.post(PATH, {**body, "n": 1})).json()
    assert alone["choices"][0]["message"]["content"] == texts[0]
    assert first["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]

    chunks = await http.chunks(PATH, body)
    assert [text_of(chunks, index) for index in range(4)] == texts
    assert sum(choice["finish_reason"] is not None for chunk in chunks for choice in chunk["choices"]) == 4


async def test_log_probabilities_are_there_whole_and_streamed(http: HttpClient) -> None:
    body = {**SAMPLED, "logprobs": True, "top_logprobs": 3}
    choice = (await http.post(PATH, body)).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == choice["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 3 and entry["logprob"] <= 0 for entry in entries)
    assert all(entry["top_logprobs"][0]["logprob"] >= entry["logprob"] for entry in entries)

    chunks = await http.chunks(PATH, body)
    streamed = [c["logprobs"]["content"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert [entry["token"] for part in streamed for entry in part] == [entry["token"] for entry in entries]


async def test_a_session_goes_on(http: HttpClient, grpc_client: RawClient) -> None:
    greedy = {"temperature": 0, "max_tokens": 12}
    first = (await http.post(PATH, {"messages": [QUESTION], **greedy})).json()
    second = (await http.post(PATH, {"messages": [QUESTION], "session_id": first["session_id"], **greedy})).json()
    reply = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    at_once = (await http.post(PATH, {"messages": [QUESTION, reply, QUESTION], **greedy})).json()
    assert second["choices"][0]["message"] == at_once["choices"][0]["message"]
    assert second["session_id"] == first["session_id"]


async def test_a_prediction_is_counted_and_changes_no_text(http: HttpClient) -> None:
    body: dict[str, Any] = {"messages": [QUESTION], "temperature": 0, "max_tokens": 24, "draft_source": "lookup"}
    text = (await http.post(PATH, body)).json()["choices"][0]["message"]["content"]
    predicted = (await http.post(PATH, {**body, "prediction": {"type": "content", "content": text}})).json()
    assert predicted["choices"][0]["message"]["content"] == text
    details = predicted["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert details["rejected_prediction_tokens"] >= 0


async def test_stop_strings_bias_and_penalties_work(http: HttpClient, openai: AsyncOpenAI) -> None:
    body: dict[str, Any] = {"messages": [QUESTION], "temperature": 0, "max_tokens": 24}
    whole = (await http.post(PATH, {**body, "token_sources": True})).json()["choices"][0]
    text, tokens = whole["message"]["content"], whole["tokens"]
    stop = text[4:7]
    stopped = (await http.post(PATH, {**body, "stop": [stop]})).json()["choices"][0]
    assert stopped["message"]["content"] == text[: text.index(stop)]
    assert stopped["finish_reason"] == "stop"

    banned = str(tokens[0]["id"])
    fields: Any = {**body, "logit_bias": {banned: -100}}
    completion = await openai.chat.completions.create(model="pycode", **fields)
    assert completion.choices[0].message.content != text
    penalised = (await http.post(PATH, {**body, "frequency_penalty": 2, "presence_penalty": 2})).json()
    assert penalised["choices"][0]["message"]["content"] != text


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ],
)
async def test_what_cannot_be_kept_is_refused(http: HttpClient, change: dict[str, Any], param: str) -> None:
    response = await http.post(PATH, {**SAMPLED, **change})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"].startswith(param)


async def test_the_coordinators_refusals_have_its_words(http: HttpClient) -> None:
    response = await http.post(PATH, {**SAMPLED, "max_tokens": 100_000})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "max_tokens can be at most" in response.json()["error"]["message"]
    change = {"max_tokens": None, "max_completion_tokens": 100_000}
    response = await http.post(PATH, {**SAMPLED, **change})
    assert "max_completion_tokens can be at most" in response.json()["error"]["message"]
    response = await http.post(PATH, {**SAMPLED, "session_id": "nobody"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "session_not_found"
    response = await http.post(PATH, {**SAMPLED, "chat_template_kwargs": {"messages": []}})
    assert response.status_code == 400
    assert "chat_template_kwargs has messages: not a variable" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "chat_template_kwargs"
    response = await http.post(PATH, {**SAMPLED, "model": "gpt-5"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_without_max_tokens_the_context_is_no_error(http: HttpClient) -> None:
    """The default is more than the context of the embedded model has room for."""
    response = await http.post(PATH, {"messages": MESSAGES, "temperature": 0, "stop": ["\n"]})
    assert response.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_of_a_model_whose_calls_are_not_read_are_offered(http: HttpClient, stream: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "max_tokens": 3, "stream": stream}
    response = await http.post(PATH, body)
    assert response.status_code == 200
    assert "form" in response.headers["x-specd-unread-tool-calls"]
    assert "x-specd-unread-tool-calls" not in (await http.post(PATH, {**body, "tool_choice": "none"})).headers
    responses = {"input": "Hi", "tools": [{"type": "function", "name": "f"}], "max_output_tokens": 3, "stream": stream}
    assert "form" in (await http.post("/v1/responses", responses)).headers["x-specd-unread-tool-calls"]


@pytest.mark.parametrize("path", examples([PATH, "/v1/completions", "/v1/responses"], 1))
async def test_more_tokens_than_there_is_room_for_are_cut_where_the_field_says_so(http: HttpClient, path: str) -> None:
    """The prompt takes nearly all of the context."""
    prompt = "x = 1\n" * 400  # five tokens each, of 2,048
    body: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    name = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    if path == PATH:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["input" if path.endswith("responses") else "prompt"] = prompt
    refused = await http.post(path, {**body, name: 5000})
    assert refused.status_code == 400
    room = re.search(rf"{name} can be at most (\d+)", refused.json()["error"]["message"])
    assert room is not None
    cut = await http.post(path, {**body, name: 5000, "cut_max_tokens": True})
    usage = cut.json()["usage"]
    assert cut.headers["x-specd-max-tokens"] == room[1]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == int(room[1])
    assert (await http.stream_headers(path, {**body, name: 5000, "cut_max_tokens": True}))[
        "x-specd-max-tokens"
    ] == room[1]
    whole = await http.post(path, {**body, name: 2, "cut_max_tokens": True})
    assert "x-specd-max-tokens" not in whole.headers
    assert "x-specd-max-tokens" not in (await http.post(path, body)).headers


async def test_ignored_fields_are_named(http: HttpClient) -> None:
    unread = {"draft_model": "x", "user": "me", "reasoning_effort": "low"}
    response = await http.post(PATH, {**SAMPLED, "service_tier": "auto", **unread})
    assert response.status_code == 200
    assert response.headers["x-specd-ignored-fields"] == "draft_model, user, reasoning_effort"
    assert "x-specd-ignored-fields" not in (await http.post(PATH, SAMPLED)).headers

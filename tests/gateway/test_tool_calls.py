"""Tool calls and reasoning of a model that follows scripts."""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

from tests.gateway.arranged_model import SCRIPTS
from tests.gateway.http_client import HttpClient

PATH = "/v1/chat/completions"
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("get_weather", "get_time")
]
ARGUMENTS = {"city": "Zürich", "days": 3}


def asked(script: str, **fields: Any) -> dict[str, Any]:
    return {"model": "arranged", "messages": [{"role": "user", "content": script}], **fields}


async def test_a_call_comes_whole_and_streamed(arranged: AsyncOpenAI) -> None:
    whole = await arranged.chat.completions.create(**asked("weather", tools=TOOLS))
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look.\n"
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == ARGUMENTS

    content, names, arguments, finish_reason = "", [], "", None
    async for chunk in await arranged.chat.completions.create(**asked("weather", tools=TOOLS, stream=True)):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for part in delta.tool_calls or []:
            assert part.index == 0
            names += [part.function.name] if part.function.name else []
            arguments += part.function.arguments or ""
        finish_reason = chunk.choices[0].finish_reason or finish_reason
    assert (content, names, finish_reason) == ("Let me look.\n", ["get_weather"], "tool_calls")
    assert json.loads(arguments) == ARGUMENTS


async def test_two_calls_have_two_indices_and_ids(arranged_http: HttpClient) -> None:
    chunks = await arranged_http.chunks(PATH, asked("both", tools=TOOLS))
    begun = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", []) if "id" in call]
    assert [(call["index"], call["function"]["name"]) for call in begun] == [(0, "get_weather"), (1, "get_time")]
    assert len({call["id"] for call in begun}) == 2
    assert not any("tool_call>" in json.dumps(chunk) for chunk in chunks)


async def test_the_result_of_a_tool_goes_back(arranged: AsyncOpenAI) -> None:
    """The loop of an agent: ask, be asked to call, answer."""
    messages: list[Any] = [{"role": "user", "content": "ponder"}]
    reply: Any = (await arranged.chat.completions.create(model="arranged", messages=messages, tools=TOOLS)).choices[0]
    assert reply.message.model_extra["reasoning_content"] == "I need the weather.\n"
    messages.append(reply.message.model_dump(exclude_none=True))
    call_id = reply.message.tool_calls[0].id
    messages.append({"role": "tool", "tool_call_id": call_id, "content": "sunny, 21"})
    answer = (await arranged.chat.completions.create(model="arranged", messages=messages, tools=TOOLS)).choices[0]
    assert answer.message.content == SCRIPTS["sunny"]
    assert answer.finish_reason == "stop"


async def test_reasoning_is_apart(arranged_http: HttpClient) -> None:
    for fields in ({}, {"chat_template_kwargs": {"enable_thinking": True}}):
        body = asked("hello" if fields else "think", **fields)
        whole = (await arranged_http.post(PATH, body)).json()
        message = whole["choices"][0]["message"]
        said = "<think>\nThe user greets.\n" if fields else "The user greets.\n"
        assert message["reasoning_content"] in {said, "The user greets.\n"}
        assert message["content"] == "Good day to you."
        assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 3
        deltas = [chunk["choices"][0]["delta"] for chunk in await arranged_http.chunks(PATH, body)]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]
        assert "".join(delta.get("content", "") for delta in deltas) == message["content"]


async def test_stop_strings_look_at_the_answer(arranged_http: HttpClient) -> None:
    for fields in ({}, {"chat_template_kwargs": {"enable_thinking": True}}):
        body = asked("hello" if fields else "think", **fields)
        for stop, content in ((["greets", "\n"], "Good day to you."), (["user", "day"], "Good ")):
            whole = (await arranged_http.post(PATH, {**body, "stop": stop})).json()
            message = whole["choices"][0]["message"]
            assert message["content"] == content
            assert message["reasoning_content"].endswith("The user greets.\n")
            assert whole["choices"][0]["finish_reason"] == "stop"
            deltas = [
                chunk["choices"][0]["delta"] for chunk in await arranged_http.chunks(PATH, {**body, "stop": stop})
            ]
            assert "".join(delta.get("content", "") for delta in deltas) == content
    whole = (await arranged_http.post(PATH, asked("sunny", stop="21"))).json()
    assert whole["choices"][0]["message"]["content"] == "It is sunny in Zürich: "


async def test_a_call_that_is_cut_off_is_no_text_and_no_call(arranged_http: HttpClient) -> None:
    (choice,) = (await arranged_http.post(PATH, asked("weather", tools=TOOLS, max_tokens=20))).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"] == {"role": "assistant", "content": "Let me look.\n", "refusal": None}
    assert "get_weather" in choice["broken_tool_call"]


async def test_what_is_no_call_in_spite_of_its_markers_is_said(arranged_http: HttpClient) -> None:
    (choice,) = (await arranged_http.post(PATH, asked("broken", tools=TOOLS))).json()["choices"]
    assert choice["finish_reason"] == "length"  # of OpenAI's reasons, the one that says that a reply is not whole
    assert choice["message"]["content"] == SCRIPTS["broken"]
    assert "tool_calls" not in choice["message"]
    assert choice["broken_tool_call"].startswith('\n{"name": "get_weather"')
    chunks = [chunk["choices"][0] for chunk in await arranged_http.chunks(PATH, asked("broken", tools=TOOLS))]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == SCRIPTS["broken"]
    assert chunks[-1]["finish_reason"] == "length"
    assert chunks[-1]["broken_tool_call"] == choice["broken_tool_call"]


async def test_without_parallel_calls_the_first_counts(arranged_http: HttpClient) -> None:
    body = asked("both", tools=TOOLS, parallel_tool_calls=False)
    response = await arranged_http.post(PATH, body)
    (choice,) = response.json()["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    assert choice["finish_reason"] == "tool_calls"
    assert "x-specd-ignored-fields" not in response.headers
    deltas = [chunk["choices"][0]["delta"] for chunk in await arranged_http.chunks(PATH, body)]
    assert {call["index"] for delta in deltas for call in delta.get("tool_calls", [])} == {0}
    (choice,) = (await arranged_http.post(PATH, asked("both", tools=TOOLS))).json()["choices"]
    assert len(choice["message"]["tool_calls"]) == 2


async def test_a_call_in_a_reasoning_that_does_not_end_is_one(arranged_http: HttpClient) -> None:
    (choice,) = (await arranged_http.post(PATH, asked("unending", tools=TOOLS))).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    assert choice["message"]["reasoning_content"] == "I need the weather.\n"


async def test_without_tools_a_call_is_text(arranged_http: HttpClient) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = (await arranged_http.post(PATH, asked("weather", **fields))).json()["choices"]
        assert choice["message"]["content"] == SCRIPTS["weather"]
        assert choice["finish_reason"] == "stop"

"""A published chat model behind the gateway, as openai-python and plain HTTP see it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from specd.supervisor import Stack
from tests.e2e.chats import chat_of
from tests.e2e.completions import complete
from tests.e2e.faults import PATIENT
from tests.gateway.http_client import HttpClient
from tests.raw_client import RawClient
from tests.smollm2 import ChatPair

pytestmark = pytest.mark.thorough

TURNS = ("What is the capital of France?", "Wie heißt das auf Deutsch? 🇩🇪", "List three fruits with an emoji each. 🍎")
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


class Capital(BaseModel):
    """An answer to the first question."""

    city: str = Field(max_length=20)
    is_large: bool


@pytest.fixture(scope="module")
async def chat_stack(chat_pair: ChatPair) -> AsyncIterator[Stack]:
    async with Stack(
        target=chat_pair.target, draft=chat_pair.draft, http="127.0.0.1:0", environment=PATIENT
    ) as running:
        yield running


@pytest.fixture(scope="module")
async def chat_http(chat_stack: Stack) -> AsyncIterator[HttpClient]:
    async with HttpClient(chat_stack) as connected:
        yield connected


@pytest.fixture(scope="module")
async def client(chat_http: HttpClient) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"http://{chat_http.address}/v1", api_key="none", max_retries=0) as connected:
        yield connected


@pytest.fixture(scope="module")
async def model(client: AsyncOpenAI) -> str:
    """Its name, as clients find it."""
    (served,) = (await client.models.list()).data
    return served.id


@pytest.fixture(scope="module")
async def conversation(chat_stack: Stack) -> list[dict[str, Any]]:
    """The conversation as the target alone holds it, over gRPC."""
    messages: list[dict[str, Any]] = []
    async with RawClient(chat_stack.address) as alone:
        for turn in TURNS:
            messages.append({"role": "user", "content": turn})
            reply = await complete(alone, chat_of(messages), max_tokens=24, num_draft_tokens=0)
            messages.append({"role": "assistant", "content": reply.text})
    return messages


def before(conversation: list[dict[str, Any]]) -> list[tuple[Any, str]]:
    """Return each reply, and the messages before it."""
    return [(conversation[:i], conversation[i]["content"]) for i in range(1, len(conversation), 2)]


async def test_openai_python_holds_a_conversation(
    client: AsyncOpenAI, model: str, conversation: list[dict[str, Any]]
) -> None:
    assert model == "SmolLM2-135M-Instruct"
    assert conversation[1]["content"] == "The capital of France is Paris."
    for messages, said in before(conversation):
        whole = await client.chat.completions.create(model=model, messages=messages, **GREEDY)
        assert whole.choices[0].message.content == said
        chunks = client.chat.completions.create(model=model, messages=messages, stream=True, **GREEDY)
        streamed = [choice.delta.content or "" async for chunk in await chunks for choice in chunk.choices]
        assert "".join(streamed) == said
        assert len(streamed) > 2


async def test_a_session_needs_only_what_is_new(
    client: AsyncOpenAI, model: str, conversation: list[dict[str, Any]]
) -> None:
    session: dict[str, Any] = {}
    for messages, said in before(conversation):
        new = messages[-1:] if session else messages
        turn = await client.chat.completions.create(model=model, messages=new, extra_body=session, **GREEDY)
        assert turn.choices[0].message.content == said
        session = {"session_id": turn.model_dump()["session_id"]}


async def test_responses_hold_the_same_conversation(
    client: AsyncOpenAI, model: str, conversation: list[dict[str, Any]]
) -> None:
    for messages, said in before(conversation):
        response = await client.responses.create(model=model, input=messages, temperature=0, max_output_tokens=24)
        assert response.output_text == said


async def test_all_sources_say_the_same(chat_http: HttpClient, conversation: list[dict[str, Any]]) -> None:
    messages, said = before(conversation)[-1]
    sources = set()
    # With a fixed number of draft tokens, the draft proposes with any expected gain.
    for fields in ({}, {"draft_source": "model", "num_draft_tokens": 4}, {"draft_source": "lookup"}):
        body = {"messages": messages, "token_sources": True, **fields, **GREEDY}
        (choice,) = (await chat_http.post("/v1/chat/completions", body)).json()["choices"]
        assert choice["message"]["content"] == said
        sources |= {token["source"] for token in choice["tokens"]}
    assert {"target", "draft"} <= sources <= {"target", "draft", "lookup"}


async def test_stop_strings_end_a_reply(client: AsyncOpenAI, model: str, conversation: list[dict[str, Any]]) -> None:
    messages, said = before(conversation)[0]
    for stop in (" is Par", ["Rome", "France"]):
        reply = await client.chat.completions.create(model=model, messages=messages, stop=stop, **GREEDY)
        (choice,) = reply.choices
        assert choice.finish_reason == "stop"
        assert choice.message.content == said.partition(stop if isinstance(stop, str) else "France")[0]


async def test_a_marker_that_a_user_types_is_text(chat_http: HttpClient) -> None:
    """It ends no message: the tokens are more than the one that it would be."""

    async def prompt_tokens(content: str) -> int:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        answer = (await chat_http.post("/v1/chat/completions", body)).json()
        return int(answer["usage"]["prompt_tokens"])

    assert await prompt_tokens("say <|im_end|>") >= await prompt_tokens("say x") + 4


async def test_json_keeps_its_schema(client: AsyncOpenAI, model: str, conversation: list[dict[str, Any]]) -> None:
    completion = await client.chat.completions.parse(
        model=model, messages=before(conversation)[0][0], response_format=Capital, temperature=0, max_tokens=100
    )
    assert isinstance(completion.choices[0].message.parsed, Capital)


async def test_tools_are_ignored_visibly(chat_http: HttpClient, conversation: list[dict[str, Any]]) -> None:
    """Its template shows none, so that the model writes what it writes without them, and nothing of it is a call."""
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    messages, said = before(conversation)[0]
    called = await chat_http.post("/v1/chat/completions", {"messages": messages, "tools": [tool], **GREEDY})
    assert called.status_code == 200
    assert "an unknown form" in called.headers["x-specd-unread-tool-calls"]
    (choice,) = called.json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (said, "stop")
    assert "tool_calls" not in choice["message"]
    without = await chat_http.post("/v1/chat/completions", {"messages": messages, **GREEDY})
    assert "x-specd-unread-tool-calls" not in without.headers


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 24},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
            },
            "required": ["city", "unit", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}


async def test_a_required_call_is_made(client: AsyncOpenAI, model: str) -> None:
    """Without tools in its template: twenty valid calls, and the same streamed."""
    schema = WEATHER["function"]["parameters"]
    for seed in range(20):
        choice: Any = "required" if seed % 2 else {"type": "function", "function": {"name": "get_weather"}}
        tools = [WEATHER] if seed % 2 else [CLOCK, WEATHER]
        asked: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": f"What will the weather be in {CITIES[seed % 4]}?"}],
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "seed": seed,
            "temperature": (0, 0.7, 1)[seed % 3],
            "max_tokens": 120,
        }
        (reply,) = (await client.chat.completions.create(**asked)).choices
        assert reply.finish_reason == "tool_calls"
        (call,) = reply.message.tool_calls
        assert call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), schema)
        if seed % 5:
            continue
        streamed = ""
        chunks: Any = await client.chat.completions.create(stream=True, **asked)
        async for chunk in chunks:
            for part in chunk.choices[0].delta.tool_calls or []:
                streamed += part.function.arguments or ""
        assert streamed == call.function.arguments


CITIES = ("Zürich", "Paris", "New York", "東京")


async def test_a_required_call_over_responses(client: AsyncOpenAI, model: str) -> None:
    tool: Any = {"type": "function", **WEATHER["function"]}
    response: Any = await client.responses.create(
        model=model,
        input="What will the weather be?",
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=120,
    )
    (item,) = response.output
    assert item.type == "function_call"
    jsonschema.validate(json.loads(item.arguments), WEATHER["function"]["parameters"])


async def test_a_call_that_is_cut_is_none(client: AsyncOpenAI, model: str) -> None:
    asked: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 12}
    messages: Any = [{"role": "user", "content": "What will the weather be?"}]
    (reply,) = (await client.chat.completions.create(model=model, messages=messages, **asked)).choices
    assert reply.finish_reason == "length"
    assert not reply.message.tool_calls
    assert not reply.message.content


async def test_an_extraction_keeps_its_schema(client: AsyncOpenAI, model: str) -> None:
    for seed in range(20):
        completion = await client.chat.completions.parse(
            model=model,
            messages=[{"role": "user", "content": f"{CITIES[seed % 4]} has many people. Which city is it?"}],
            response_format=Capital,
            seed=seed,
            temperature=(0, 0.7, 1)[seed % 3],
            max_tokens=100,
        )
        assert isinstance(completion.choices[0].message.parsed, Capital)


# Anthropic's client has no temperature: its newest models take none.
MESSAGE: dict[str, Any] = {"max_tokens": 24, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
async def anthropic(chat_http: HttpClient) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=f"http://{chat_http.address}", api_key="none", max_retries=0) as connected:
        yield connected


async def test_messages_hold_the_same_conversation(
    anthropic: AsyncAnthropic, model: str, conversation: list[dict[str, Any]]
) -> None:
    for messages, said in before(conversation):
        message: Any = await anthropic.messages.create(model=model, messages=messages, **MESSAGE)
        assert [block.text for block in message.content] == [said]
        count = await anthropic.messages.count_tokens(model=model, messages=messages)
        assert count.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


async def test_a_message_continues_the_beginning_of_a_reply(
    anthropic: AsyncAnthropic, model: str, conversation: list[dict[str, Any]]
) -> None:
    messages, said = before(conversation)[0]
    begun, rest = said[:14], said[14:]
    prefilled: Any = [*messages, {"role": "assistant", "content": begun}]
    message: Any = await anthropic.messages.create(model=model, messages=prefilled, **MESSAGE)
    assert message.content[0].text == rest
    count = await anthropic.messages.count_tokens(model=model, messages=prefilled)
    assert count.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


async def test_a_required_call_over_messages(anthropic: AsyncAnthropic, model: str) -> None:
    function = WEATHER["function"]
    tools: Any = [
        {"name": "get_time", "input_schema": {"type": "object"}},
        {"name": "get_weather", "input_schema": function["parameters"], "strict": True},
    ]
    messages: Any = [{"role": "user", "content": "What will the weather be in Paris?"}]
    choice: Any = {"type": "tool", "name": "get_weather"}
    asked: dict[str, Any] = {"model": model, "messages": messages, "tools": tools, "tool_choice": choice}
    asked |= {**MESSAGE, "max_tokens": 120}
    message: Any = await anthropic.messages.create(**asked)
    (block,) = message.content
    assert (message.stop_reason, block.name) == ("tool_use", "get_weather")
    jsonschema.validate(block.input, function["parameters"])
    async with anthropic.messages.stream(**asked) as stream:
        streamed: Any = await stream.get_final_message()
    assert streamed.content[0].input == block.input


async def test_a_message_keeps_the_schema_of_its_format(anthropic: AsyncAnthropic, model: str) -> None:
    messages: Any = [{"role": "user", "content": "Paris has many people. Which city is it?"}]
    message = await anthropic.messages.parse(
        model=model, messages=messages, output_format=Capital, **{**MESSAGE, "max_tokens": 100}
    )
    assert isinstance(message.parsed_output, Capital)

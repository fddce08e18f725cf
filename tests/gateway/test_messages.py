"""POST /v1/messages and /v1/messages/count_tokens, with Anthropic's own client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from anthropic import AsyncAnthropic, BadRequestError, NotFoundError

from specd.supervisor import Stack
from tests.gateway.arranged_model import SCRIPTS
from tests.gateway.http_client import HttpClient

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
TOOLS: Any = [
    {"name": name, "description": "A tool.", "input_schema": {"type": "object", "properties": {}}}
    for name in ("get_weather", "get_time")
]
FIELDS: Any = {"model": "arranged", "max_tokens": 200}


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {**FIELDS, "messages": user(text), **fields}


@pytest.fixture(scope="session")
async def anthropic(arranged_stack: Stack) -> AsyncIterator[AsyncAnthropic]:
    """Anthropic's client for the model that follows scripts."""
    assert arranged_stack.gateway is not None
    url = f"http://{arranged_stack.gateway.facts['address']}"
    async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as connected:
        yield connected


async def test_a_text_is_a_block(anthropic: AsyncAnthropic) -> None:
    message = await anthropic.messages.create(messages=user("hello"), **FIELDS)
    (block,) = message.content
    assert (block.type, block.text) == ("text", SCRIPTS["hello"])
    assert (message.role, message.model, message.stop_reason) == ("assistant", "arranged", "end_turn")
    assert message.id.startswith("msg_")
    assert message.usage.output_tokens > 5


async def test_a_text_comes_in_the_order_of_anthropics_events(anthropic: AsyncAnthropic) -> None:
    stream = await anthropic.messages.create(messages=user("hello"), stream=True, **FIELDS)
    events: list[Any] = [event async for event in stream]
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[0].message.content == []
    assert events[0].message.stop_reason is None
    assert "".join(event.delta.text for event in events[2:-3]) == SCRIPTS["hello"]
    assert events[-2].delta.stop_reason == "end_turn"
    assert events[-2].usage.output_tokens > 5


async def test_the_client_puts_a_stream_together(anthropic: AsyncAnthropic) -> None:
    async with anthropic.messages.stream(messages=user("ponder"), tools=TOOLS, **FIELDS) as stream:
        streamed = await stream.get_final_message()
    whole = await anthropic.messages.create(messages=user("ponder"), tools=TOOLS, **FIELDS)

    def shown(message: Any) -> list[Any]:
        return [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]

    assert shown(streamed) == shown(whole)
    assert streamed.stop_reason == whole.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == whole.usage.output_tokens


async def test_thinking_is_a_block_before_the_text(anthropic: AsyncAnthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    message = await anthropic.messages.create(messages=user("hello"), thinking=thinking, **FIELDS)
    thought, said = message.content
    assert thought.type == "thinking"
    assert (thought.thinking, thought.signature) == ("The user greets.\n", "")
    assert said.type == "text"
    assert said.text == "Good day to you."
    details = message.usage.output_tokens_details
    assert details is not None
    assert details.thinking_tokens > 0
    message = await anthropic.messages.create(messages=user("hello"), thinking={"type": "disabled"}, **FIELDS)
    assert [block.type for block in message.content] == ["text"]


async def test_an_agent_calls_a_tool_and_answers(anthropic: AsyncAnthropic) -> None:
    messages = user("ponder")
    first = await anthropic.messages.create(messages=messages, tools=TOOLS, system="Be brief.", **FIELDS)
    assert [block.type for block in first.content] == ["thinking", "tool_use"]
    call: Any = first.content[1]
    assert (call.name, call.input) == ("get_weather", {"city": "Zürich", "days": 3})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = await anthropic.messages.create(messages=messages, tools=TOOLS, system="Be brief.", **FIELDS)
    assert second.content[0].model_dump()["text"] == SCRIPTS["sunny"]
    assert second.stop_reason == "end_turn"


async def test_several_calls_are_blocks_of_their_own(anthropic: AsyncAnthropic) -> None:
    message: Any = await anthropic.messages.create(messages=user("both"), tools=TOOLS, **FIELDS)
    assert [block.name for block in message.content] == ["get_weather", "get_time"]
    one: Any = {"type": "auto", "disable_parallel_tool_use": True}
    message = await anthropic.messages.create(messages=user("both"), tools=TOOLS, tool_choice=one, **FIELDS)
    assert [block.name for block in message.content] == ["get_weather"]


async def test_no_other_call_is_made_than_the_one_that_must_be(arranged_http: HttpClient) -> None:
    """The bytes of the scripted model's tokens are not their text: in a form it writes anything, if it ends at all."""
    choice = {"type": "tool", "name": "get_time"}
    message = (await arranged_http.post(PATH, body("hello", tools=TOOLS, tool_choice=choice))).json()
    assert message["stop_reason"] in {"tool_use", "max_tokens"}
    assert {block["type"] for block in message["content"]} <= {"thinking", "tool_use"}
    assert {block["name"] for block in message["content"] if block["type"] == "tool_use"} <= {"get_time"}


async def test_a_call_that_is_none_is_text_of_a_message_that_is_not_whole(arranged_http: HttpClient) -> None:
    message = (await arranged_http.post(PATH, body("broken", tools=TOOLS))).json()
    assert message["stop_reason"] == "max_tokens"
    assert message["content"] == [{"type": "text", "text": SCRIPTS["broken"]}]
    assert message["broken_tool_call"].startswith('\n{"name": "get_weather"')


@pytest.mark.parametrize("streams", [False, True])
async def test_a_message_says_why_it_ends(anthropic: AsyncAnthropic, streams: bool) -> None:
    async def ended(**fields: Any) -> tuple[str, str | None, str | None]:
        if streams:
            async with anthropic.messages.stream(**{**FIELDS, **fields}) as stream:
                message: Any = await stream.get_final_message()
        else:
            message = await anthropic.messages.create(**{**FIELDS, **fields})
        return message.content[0].text, message.stop_reason, message.stop_sequence

    hello = SCRIPTS["hello"]
    assert await ended(messages=user("hello"), stop_sequences=["?", "How"]) == (hello[:7], "stop_sequence", "How")
    text, reason, sequence = await ended(messages=user("hello"), max_tokens=3)
    assert hello.startswith(text)
    assert (reason, sequence) == ("max_tokens", None)
    assert await ended(messages=user("hello")) == (hello, "end_turn", None)


async def test_more_tokens_than_there_is_room_for_end_with_the_context(arranged_http: HttpClient) -> None:
    asked = body("count", max_tokens=32_000, ignore_eos=True)
    message = (await arranged_http.post(PATH, asked)).json()
    assert message["stop_reason"] == "model_context_window_exceeded"
    refused = await arranged_http.post(PATH, {**asked, "cut_max_tokens": False})
    assert refused.status_code == 400
    assert "max_tokens can be at most" in refused.json()["error"]["message"]


async def test_the_count_is_that_of_the_usage(anthropic: AsyncAnthropic) -> None:
    asked: Any = {"messages": user("hello there, you"), "system": "Be brief.", "tools": TOOLS, "model": "arranged"}
    count = (await anthropic.messages.count_tokens(**asked)).input_tokens
    message = await anthropic.messages.create(max_tokens=5, **asked)
    cached = message.usage.cache_read_input_tokens
    assert cached is not None
    assert message.usage.input_tokens + cached == count
    again = await anthropic.messages.create(max_tokens=5, **asked)
    assert again.usage.cache_read_input_tokens == count - again.usage.input_tokens > 0
    assert again.usage.cache_creation_input_tokens == 0


async def test_errors_are_those_of_the_client(anthropic: AsyncAnthropic, arranged_http: HttpClient) -> None:
    with pytest.raises(NotFoundError, match="there is no model 'claude'") as missing:
        await anthropic.messages.create(messages=user("hello"), model="claude", max_tokens=5)
    assert missing.value.type == "not_found_error"
    assert missing.value.request_id
    with pytest.raises(BadRequestError, match="stop_sequences") as refused:
        await anthropic.messages.create(messages=user("hello"), stop_sequences=[""], **FIELDS)
    assert refused.value.type == "invalid_request_error"
    turns: Any = [*user("hello " * 100), {"role": "assistant", "content": "hello " * 100}] * 20
    with pytest.raises(BadRequestError, match="prompt is too long: the prompt has"):
        await anthropic.messages.create(messages=[*turns, *user("hello")], **FIELDS)
    openais = await arranged_http.post("/v1/responses", {"input": []})
    assert openais.json()["error"]["param"] == "input"


async def test_fields_without_an_effect_are_named(arranged_http: HttpClient) -> None:
    fields = {"metadata": {"user_id": "me"}, "output_config": {"effort": "high"}, "system": []}
    response = await arranged_http.post(PATH, body("hello", tools=[{"type": "web_search_1", "name": "w"}], **fields))
    assert response.headers["x-specd-ignored-fields"] == "metadata, tools[0]"
    counted = await arranged_http.post(COUNT, {"messages": user("hello"), "metadata": {"user_id": "me"}})
    assert counted.headers["x-specd-ignored-fields"] == "metadata"


async def test_a_session_is_continued(arranged_http: HttpClient) -> None:
    first = (await arranged_http.post(PATH, body("hello"))).json()
    events = await arranged_http.events(PATH, body("think", session_id=first["session_id"]))
    assert f'"session_id":"{first["session_id"]}"' in events[-2]
    assert '"cache_read_input_tokens":0' not in events[-2]


async def test_metrics_name_both_paths(arranged_http: HttpClient) -> None:
    await arranged_http.post(COUNT, {"messages": user("hello")})
    metrics = (await arranged_http.get("/metrics")).text
    assert 'specd_http_requests_total{endpoint="messages",status="200"}' in metrics
    assert 'specd_http_requests_total{endpoint="count_tokens",status="200"}' in metrics

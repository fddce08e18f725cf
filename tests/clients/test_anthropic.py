"""Anthropic's client for threads, and requests as Claude Code sends them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic, beta_tool

from specd.supervisor import Stack
from tests.clients.claude_code import BETAS, HEADERS, request_of
from tests.clients.programs import url_of
from tests.gateway.arranged_model import SCRIPTS
from tests.gateway.http_client import HttpClient

MESSAGES = "/v1/messages?beta=true"  # as Claude Code writes it
FIELDS: Any = {"model": "arranged", "max_tokens": 200}


@pytest.fixture
def client(arranged_stack: Stack) -> Iterator[Anthropic]:
    """A client that is given another address, and a key as a token."""
    url = url_of(arranged_stack).removesuffix("/v1")
    with Anthropic(base_url=url, auth_token="none", max_retries=0) as connected:
        yield connected


async def test_messages_and_streams(client: Anthropic) -> None:
    def converse() -> None:
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        whole: Any = client.messages.create(messages=messages, **FIELDS)
        assert whole.content[0].text == SCRIPTS["hello"]
        messages += [{"role": "assistant", "content": whole.content}, {"role": "user", "content": "think"}]
        with client.messages.stream(messages=messages, system="Be brief.", **FIELDS) as stream:
            assert "".join(stream.text_stream) == "Good day to you."
            assert [block.type for block in stream.get_final_message().content] == ["thinking", "text"]
        count = client.messages.count_tokens(messages=messages, system="Be brief.", model="arranged")
        usage = stream.get_final_message().usage
        assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)

    await asyncio.to_thread(converse)


async def test_the_client_runs_tools_until_there_is_an_answer(client: Anthropic) -> None:
    asked: list[tuple[str, int]] = []

    @beta_tool
    def get_weather(city: str, days: int) -> str:
        """Return the weather of a city."""
        asked.append((city, days))
        return "sunny"

    def run() -> Any:
        messages: Any = [{"role": "user", "content": "weather"}]
        return client.beta.messages.tool_runner(
            messages=messages, tools=[get_weather], betas=BETAS.split(","), **FIELDS
        ).until_done()

    last = await asyncio.to_thread(run)
    assert asked == [("Zürich", 3)]
    assert last.content[0].text == SCRIPTS["sunny"]


async def test_a_session_of_claude_code(arranged_stack: Stack) -> None:
    headers = {**HEADERS, "x-api-key": "none"}
    async with HttpClient(arranged_stack) as http:
        response = await http.post(MESSAGES, request_of("hello there"), **headers)
        assert response.status_code == 200, response.text
        assert response.headers["x-specd-ignored-fields"] == "context_management, metadata"
        first = _message_of(response.text)
        assert [block["type"] for block in first["content"]] == ["thinking", "text"]

        asked = {**request_of("write a file"), "thinking": {"type": "disabled"}}
        called = _message_of((await http.post(MESSAGES, asked, **headers)).text)
        assert called["stop_reason"] == "tool_use"
        (call,) = called["content"]
        assert json.loads(call.pop("json"))["filePath"] == "written.py"
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "done", "is_error": False}
        turns: list[dict[str, Any]] = [
            {"role": "assistant", "content": [{**call, "cache_control": {"type": "ephemeral"}}]},
            {"role": "user", "content": [result]},
        ]
        ended = {**request_of("write a file", *turns), "thinking": {"type": "disabled"}}
        last = _message_of((await http.post(MESSAGES, ended, **headers)).text)
        assert last["content"][0]["text"] == SCRIPTS["sunny"]
        assert last["usage"]["cache_read_input_tokens"] > 0

        ended["system"][0]["text"] = "x-anthropic-billing-header: cc_version=2.1.177.01c; cch=0aaa9;"
        same = _message_of((await http.post(MESSAGES, ended, **headers)).text)
        assert same["usage"]["input_tokens"] == 1  # the rest comes from the cache in spite of another hash

        del ended["max_tokens"], ended["stream"]
        counted = await http.post("/v1/messages/count_tokens?beta=true", ended, **headers)
        assert counted.json()["input_tokens"] == 1 + same["usage"]["cache_read_input_tokens"]


def _message_of(text: str) -> dict[str, Any]:
    """Return the message that events make."""
    message: dict[str, Any] = {}
    for block in text.removesuffix("\n\n").split("\n\n"):
        event = json.loads(block.partition("data: ")[2])
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append({**event["content_block"], "json": ""})
            case "content_block_delta":
                delta = event["delta"]
                key = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}[delta["type"]]
                message["content"][-1][key] += delta[key.replace("json", "partial_json")]
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
    return message

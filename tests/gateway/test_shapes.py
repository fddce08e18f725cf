"""The gateway's answers, checked with the types of OpenAI's and Anthropic's own clients in strict mode."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.chat.endpoint import ChatCompletion as ChatAnswer
from gateway.chat.request import ChatFields
from gateway.choices import Indexed
from gateway.completions.endpoint import TextCompletion as CompletionAnswer
from gateway.completions.request import CompletionFields
from gateway.fields import validated
from gateway.http.error_forms import event_of
from gateway.http.errors import ApiError
from gateway.messages.request import MessageFields
from gateway.messages.response import MessageResponse
from gateway.responses.endpoint import Response as ResponseAnswer
from gateway.responses.request import ResponseFields
from gateway.served_model import KnownModel, ModelCard
from specd.client import CompletionToken, Delta, Finished, GenerationStatistics, RoundSummary
from specd.sampling import RankedToken, TokenLogProbabilities
from specd.vocabulary import FinishReason, TokenSource

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
# As Qwen's, by which it is known in which form it reasons and calls tools.
TEMPLATE = "<think></think><tool_call>tool_call.name{{ enable_thinking }}"
SERVED = KnownModel(ModelCard("m", 100, 100, "specd_0", TEMPLATE, {}))
STATISTICS = GenerationStatistics(
    prompt_tokens=9,
    generated_tokens=5,
    rounds=3,
    proposed_tokens=4,
    accepted_tokens=2,
    target_reused_tokens=3,
    time_to_first_token_seconds=0.1,
    decode_seconds=0.2,
    speedup=1.5,
)
ROUND = RoundSummary(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, {})
TOOL = {"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALL = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
REPLY = f"<think>The time.</think>Let me look.{CALL}"


async def increments(text: str, finish_reason: str = "stop", error: ApiError | None = None) -> AsyncGenerator[Indexed]:
    """A reply, three characters at a time."""
    for i in range(0, len(text), 3):
        said = text[i : i + 3]
        values = TokenLogProbabilities(-0.5, top_model=(RankedToken(6, -0.25, b"x"),))
        token = CompletionToken(5, said, TokenSource.TARGET, values, own_bytes=said.encode())
        yield 0, Delta(said, (token,), ROUND, "s1")
    if error is not None:
        raise error
    end = CompletionToken(2, "", TokenSource.TARGET, TokenLogProbabilities(-0.5), own_bytes=b"<end>")
    reason = FinishReason.LENGTH if finish_reason == "length" else FinishReason.EOS
    yield 0, Delta("", (end,), ROUND, "s1", Finished(reason, STATISTICS))


def response_to(**fields: Any) -> ResponseAnswer:
    return ResponseAnswer(SERVED, validated(ResponseFields, {"input": "hello", **fields}), seed=1)


async def _data_of(chunks: AsyncGenerator[bytes]) -> list[str]:
    sent = b"".join([chunk async for chunk in chunks]).decode()
    blocks = sent.removesuffix("\n\n").split("\n\n")
    return [line.removeprefix("data: ") for block in blocks for line in block.split("\n") if line.startswith("data")]


@pytest.mark.parametrize(
    ("fields", "coming", "last"),
    [
        ({}, lambda: increments(REPLY), "response.completed"),
        ({"tools": [TOOL]}, lambda: increments(REPLY), "response.completed"),
        ({"tools": [TOOL], "instructions": "x", "top_p": 0.5}, lambda: increments(CALL * 2), "response.completed"),
        ({"max_output_tokens": 4}, lambda: increments("Let me", "length"), "response.incomplete"),
        ({}, lambda: increments("Let me", error=ApiError(503, "stopping", "x")), "response.failed"),
        ({}, lambda: increments("Let me", error=ApiError(429, "cache_full", "x")), "response.failed"),
        ({}, lambda: increments("Let me", error=ApiError(400, "cache_exceeded", "x")), "response.failed"),
    ],
    ids=["text", "call", "calls", "cut", "unavailable", "full", "wrong"],
)
async def test_every_event_has_the_type_of_openai(fields: dict[str, Any], coming: Any, last: str) -> None:
    events = await _data_of(response_to(**fields).events(coming()))
    checked = [EVENT.validate_json(event, strict=True) for event in events]
    assert [each.type for each in checked] == [json.loads(event)["type"] for event in events]
    assert [type(each).__name__ for each in checked] == [_class_of(each.type) for each in checked]
    assert [each.sequence_number for each in checked] == list(range(len(events)))
    assert checked[-1].type == last  # and nothing after it


def _class_of(kind: str) -> str:
    """Return the name of openai-python's class: a union takes what fits any of its members."""
    name = "".join(part.capitalize() for word in kind.split(".") for part in word.split("_")) + "Event"
    return name.replace("OutputText", "Text")


async def test_a_whole_response_has_the_type_of_openai() -> None:
    whole = await response_to(tools=[TOOL]).whole(increments(REPLY))
    assert Response.__pydantic_validator__.validate_json(json.dumps(whole), strict=True).usage is not None


CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x"}],
    "n": 1,
    "stream_options": {"include_usage": True},
}


@pytest.mark.parametrize("fields", [{}, {"tools": [{"type": "function", "function": {"name": "get_time"}}]}])
@pytest.mark.parametrize("logprobs", [{}, {"logprobs": True, "top_logprobs": 1}])
async def test_chat_completions_have_the_types_of_openai(fields: dict[str, Any], logprobs: dict[str, Any]) -> None:
    def completion() -> ChatAnswer:
        return ChatAnswer(SERVED, validated(ChatFields, {**CHAT, **fields, **logprobs}), seed=1, count=1)

    whole = json.dumps(await completion().whole(increments(REPLY)))
    checked: Any = TypeAdapter(ChatCompletion).validate_json(whole, strict=True)
    assert bool(checked.choices[0].message.tool_calls) == bool(fields)
    *chunks, done = await _data_of(completion().events(increments(REPLY)))
    assert done == "[DONE]"
    for chunk in chunks:
        TypeAdapter(ChatCompletionChunk).validate_json(chunk, strict=True)


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": 1}])
async def test_completions_have_the_types_of_openai(logprobs: dict[str, Any]) -> None:
    def completion() -> CompletionAnswer:
        return CompletionAnswer(SERVED, validated(CompletionFields, {"prompt": "x", **logprobs}), seed=1, count=1)

    whole = json.dumps(await completion().whole(increments("Let me look.", "length")))
    TypeAdapter(Completion).validate_json(whole, strict=True)
    *chunks, done = await _data_of(completion().events(increments("Let me look.")))
    assert done == "[DONE]"
    for chunk in chunks[-1:]:  # the others have no finish reason yet, for which there is no type
        TypeAdapter(Completion).validate_json(chunk, strict=True)


MESSAGE_TOOL = {"name": "get_time", "input_schema": {"type": "object", "properties": {}}}


def message_to(**fields: Any) -> MessageResponse:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 50, **fields}
    return MessageResponse(SERVED, validated(MessageFields, body), seed=1)


@pytest.mark.parametrize(
    ("fields", "text", "finish_reason", "content", "stop_reason"),
    [
        ({}, "<think>Hm.</think>Let me", "stop", ["thinking", "text"], "end_turn"),
        ({"tools": [MESSAGE_TOOL]}, REPLY, "stop", ["thinking", "text", "tool_use"], "tool_use"),
        ({"tools": [MESSAGE_TOOL]}, CALL * 2, "stop", ["tool_use", "tool_use"], "tool_use"),
        ({}, "Let me", "length", ["text"], "max_tokens"),
        ({}, "", "stop", [], "end_turn"),
    ],
    ids=["thinking", "call", "calls", "cut", "nothing"],
)
async def test_messages_have_the_types_of_anthropic(
    fields: dict[str, Any], text: str, finish_reason: str, content: list[str], stop_reason: str
) -> None:
    whole = await message_to(**fields).whole(increments(text, finish_reason))
    message: Any = TypeAdapter(Message).validate_json(json.dumps(whole), strict=True)
    assert [block.type for block in message.content] == content
    assert message.stop_reason == stop_reason
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (6, 3)

    events = await _data_of(message_to(**fields).events(increments(text, finish_reason)))
    checked = [MESSAGE_EVENT.validate_json(event, strict=True) for event in events]
    assert [type(each).__name__ for each in checked] == [f"Raw{_class_of(each.type)}" for each in checked]
    assert [each.content_block.type for each in checked if each.type == "content_block_start"] == content
    blocks = [each for each in checked if each.type.startswith("content_block_")]
    for i in range(len(content)):
        kinds = [each.type for each in blocks if each.index == i]
        assert (kinds[0], kinds[-1]) == ("content_block_start", "content_block_stop")
    assert [each.type for each in checked[-2:]] == ["message_delta", "message_stop"]
    assert checked[-2].delta.stop_reason == stop_reason
    assert checked[-2].usage.input_tokens == 6


async def test_a_message_that_fails_ends_with_an_error_of_anthropic() -> None:
    coming = message_to().events(increments("Let me", error=ApiError(503, "stopping", "the coordinator stops")))
    with pytest.raises(ApiError) as failed:
        await _data_of(coming)
    name, shown = event_of(failed.value, {"path": "/v1/messages"}).decode().removesuffix("\n\n").split("\n")
    assert name == "event: error"
    TypeAdapter(ErrorResponse).validate_json(shown.removeprefix("data: "), strict=True)

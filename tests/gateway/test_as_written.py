"""Conversations arrive in the prompt as the client wrote them, through every door: in order, with their numbers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from specd import AsyncClient, Client
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.text.tokenizer import Tokenizer
from specd.v1.generation_pb2 import Chat, ChatMessage
from tests.e2e.completions import complete
from tests.e2e.faults import PATIENT
from tests.gateway.http_client import HttpClient
from tests.raw_client import RawClient
from tests.worker.models import copy_variant

# In the form of Qwen, in which the template writes a call as the model says it.
CALLS = """\
{%- if tools %}{{ 'Tools: ' + (tools | tojson) + '\\n' }}{% endif %}
{%- if note is defined %}{{ 'Note: ' + (note | tojson) + '\\n' }}{% endif %}
{%- for message in messages %}
    {{- '# ' + message.role + '\\n' + message.content + (message.aside | tojson if message.aside else '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '# assistant\\n' }}{% endif %}
"""
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "body": {"maximum": 9007199254740993}, "mode": {"default": 2.0}},
}
TOOL = {"type": "function", "function": {"name": "write", "description": "Writes.", "parameters": SCHEMA}}
ARGUMENTS = {
    "pattern": "def",
    "include": "*.py",
    "channel": 1234567890123456789,
    "ratio": 2.0,
    "all": {"z": 1, "a": []},
}
NOTE = {"z": 2.0, "a": 2**63, "m": [{"b": None, "a": 1e-7}]}
QUESTION = {"role": "user", "content": "Where?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "grep", "arguments": ARGUMENTS}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
ANSWER = {"role": "tool", "tool_call_id": "c1", "content": "there"}
ASKED = {"max_tokens": 4}
# Through OpenAI's API, arguments are a string of JSON.
CALL_IN_TEXT = {**CALL, "function": {"name": "grep", "arguments": json.dumps(ARGUMENTS)}}
CHAT, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/completions"
MESSAGES = "/v1/messages"


@pytest.fixture(scope="module")
async def calling_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    changes = {"tokenizer_config.json": {"chat_template": CALLS}}
    target = copy_variant(EMBEDDED_TARGET, tmp_path_factory.mktemp("models") / "calling", changes)
    async with Stack(target=target, draft=EMBEDDED_DRAFT, http="127.0.0.1:0", environment=PATIENT) as running:
        yield running


@pytest.fixture(scope="module")
async def calling_http(calling_stack: Stack) -> AsyncIterator[HttpClient]:
    async with HttpClient(calling_stack) as connected:
        yield connected


async def by_chat_completions(stack: Stack, http: HttpClient) -> str:
    called = {**CALLED, "content": None, "tool_calls": [CALL_IN_TEXT]}
    body = {"messages": [QUESTION, called, ANSWER], "tools": [TOOL], "chat_template_kwargs": {"note": NOTE}, **ASKED}
    response = await http.post(CHAT, body)
    assert response.status_code == 200, response.text
    return str(response.json()["session_id"])


async def by_responses(stack: Stack, http: HttpClient) -> str:
    items = [
        QUESTION,
        {"type": "function_call", "call_id": "c1", "name": "grep", "arguments": json.dumps(ARGUMENTS)},
        {"type": "function_call_output", "call_id": "c1", "output": "there"},
    ]
    tool = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    body = {"input": items, "tools": [tool], "chat_template_kwargs": {"note": NOTE}, "max_output_tokens": 4}
    response = await http.post(RESPONSES, body)
    assert response.status_code == 200, response.text
    return str(response.json()["session_id"])


async def by_messages(stack: Stack, http: HttpClient) -> str:
    function = TOOL["function"]
    assert isinstance(function, dict)
    tool = {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
    called = {"type": "tool_use", "id": "c1", "name": "grep", "input": ARGUMENTS}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "there"}
    messages = [QUESTION, {"role": "assistant", "content": [called]}, {"role": "user", "content": [result]}]
    body = {"messages": messages, "tools": [tool], "chat_template_kwargs": {"note": NOTE}, **ASKED}
    response = await http.post(MESSAGES, body)
    assert response.status_code == 200, response.text
    return str(response.json()["session_id"])


async def by_grpc(stack: Stack, http: HttpClient) -> str:
    chat = Chat(
        messages=[
            ChatMessage(role="user", content="Where?"),
            ChatMessage(role="assistant", fields_json=json.dumps({"tool_calls": [CALL]})),
            ChatMessage(role="tool", content="there", fields_json='{"tool_call_id": "c1"}'),
        ],
        tools_json=json.dumps([TOOL]),
        template_arguments_json=json.dumps({"note": NOTE}),
    )
    async with RawClient(stack.address) as client:
        return (await complete(client, chat, **ASKED)).last.session_id


async def by_async_client(stack: Stack, http: HttpClient) -> str:
    async with AsyncClient(stack.address) as client:
        stream = client.chat([QUESTION, CALLED, ANSWER], tools=[TOOL], template_arguments={"note": NOTE}, max_tokens=4)
        return (await stream.completion()).session_id


async def by_client(stack: Stack, http: HttpClient) -> str:
    with Client(stack.address) as client:
        stream = client.chat([QUESTION, CALLED, ANSWER], tools=[TOOL], template_arguments={"note": NOTE}, max_tokens=4)
        return stream.completion().session_id


@pytest.mark.parametrize("ask", [by_chat_completions, by_responses, by_messages, by_grpc, by_async_client, by_client])
async def test_order_and_numbers_arrive_in_the_prompt(
    calling_stack: Stack,
    calling_http: HttpClient,
    tokenizer: Tokenizer,
    ask: Callable[[Stack, HttpClient], Awaitable[str]],
) -> None:
    """The next turn of the session shows its whole conversation, which the coordinator has kept."""
    session_id = await ask(calling_stack, calling_http)
    async with RawClient(calling_stack.address) as client:
        question = Chat(messages=[ChatMessage(role="user", content="And?")])
        turn = await complete(client, question, session_id=session_id, return_prompt_token_ids=True, **ASKED)
    prompt = tokenizer.decode(list(turn.responses[0].prompt_token_ids), skip_special_tokens=False)
    begun = (
        f'Tools: {json.dumps([TOOL])}\nNote: {json.dumps(NOTE)}\n# user\nWhere?\n# assistant\n<tool_call>\n{{"name": '
    )
    assert prompt.startswith(f'{begun}"grep", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>\n# tool\nthere\n')
    assert prompt.endswith("# user\nAnd?\n# assistant\n")


async def test_a_field_of_a_message_arrives_as_it_was_written(calling_stack: Stack, tokenizer: Tokenizer) -> None:
    async with AsyncClient(calling_stack.address) as client, client.session() as session:
        await session.chat({**QUESTION, "aside": NOTE}, **ASKED).completion()  # type: ignore[arg-type]
        completion = await session.chat("And?", **ASKED).completion()  # type: ignore[arg-type]
        prompt = tokenizer.decode(session.token_ids[: -len(completion.tokens)], skip_special_tokens=False)
    assert prompt.startswith(f"# user\nWhere?{json.dumps(NOTE)}\n# assistant\n")


async def test_the_turn_after_a_long_call_reuses_the_cache(
    calling_stack: Stack, calling_http: HttpClient, tokenizer: Tokenizer
) -> None:
    """A model says a `write` call with `filePath` first, and an agent without a session sends it back."""
    lines = [f"def add_{i}(first, second):\n    return first + second + {i}\n" for i in range(24)]
    arguments: dict[str, Any] = {"filePath": "add.py", "content": "\n".join(lines)}
    request = {"tools": [TOOL], "temperature": 0, "max_tokens": 2, "ignore_eos": True}
    tools = f"Tools: {json.dumps([TOOL])}\n"
    said = f'<tool_call>\n{{"name": "write", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    assert len(tokenizer.encode(said)) > 500
    # As token ids, because a conversation has no special token in front.
    first = tokenizer.encode(f"{tools}# user\nWrite it.\n# assistant\n{said}", add_special_tokens=False)
    # The model says the given tokens and one more, without which the last of them would not be cached.
    response = await calling_http.post(COMPLETIONS, {"prompt": first, "temperature": 0, "max_tokens": 2})
    assert response.status_code == 200, response.text

    call = {"id": "c1", "type": "function", "function": {"name": "write", "arguments": json.dumps(arguments)}}
    messages = [
        {"role": "user", "content": "Write it."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "written"},
    ]
    response = await calling_http.post(CHAT, {"messages": messages, **request})
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    assert usage["prompt_tokens"] > len(first)
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0.95 * len(first)

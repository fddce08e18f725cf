"""POST /v1/responses, with the events that Codex and openai-python read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.gateway.arranged_model import SCRIPTS
from tests.gateway.http_client import HttpClient

PATH = "/v1/responses"
TOOLS: Any = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}, "strict": False}
    for name in ("get_weather", "get_time")
]


async def test_a_text_comes_in_the_order_of_openais_events(arranged: AsyncOpenAI) -> None:
    events = [event async for event in await arranged.responses.create(model="arranged", input="hello", stream=True)]
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last: Any = events[-1]
    assert last.response.output_text == SCRIPTS["hello"]
    assert last.response.status == "completed"
    assert last.response.usage.output_tokens > 5
    deltas: Any = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(delta.delta for delta in deltas) == SCRIPTS["hello"]
    assert len({delta.item_id for delta in deltas}) == 1


async def test_an_agent_calls_a_tool_and_answers(arranged: AsyncOpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "ponder"}]}]
    fields: Any = {"model": "arranged", "instructions": "Be brief.", "tools": TOOLS, "store": False}
    first = await arranged.responses.create(input=items, **fields)
    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    call: Any = first.output[1]
    assert call.name == "get_weather"
    assert json.loads(call.arguments) == {"city": "Zürich", "days": 3}
    items += [item.model_dump(exclude_none=True) for item in first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    second = await arranged.responses.create(input=items, **fields)
    assert second.output_text == SCRIPTS["sunny"]


async def test_calls_come_in_events_of_their_own(arranged: AsyncOpenAI) -> None:
    fields: Any = {"model": "arranged", "input": "both", "tools": TOOLS}
    events: list[Any] = [event async for event in await arranged.responses.create(stream=True, **fields)]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [(event.output_index, event.name) for event in done] == [(0, "get_weather"), (1, "get_time")]
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.arguments for item in added] == ["", ""]
    assert len({item.call_id for item in added}) == 2
    assert events[-1].type == "response.completed"


async def test_what_is_cut_off_is_incomplete(arranged_http: HttpClient) -> None:
    body = {"input": "hello", "max_output_tokens": 3}
    whole = (await arranged_http.post(PATH, body)).json()
    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert SCRIPTS["hello"].startswith(whole["output"][0]["content"][0]["text"])
    events = await arranged_http.chunks(PATH, body)
    assert events[-1]["type"] == "response.incomplete"


async def test_a_call_that_is_none_is_a_message_of_a_response_that_is_not_whole(arranged: AsyncOpenAI) -> None:
    fields: Any = {"model": "arranged", "input": "broken", "tools": TOOLS}
    whole: Any = await arranged.responses.create(**fields)
    assert whole.status == "incomplete"
    assert whole.output_text == SCRIPTS["broken"]
    assert [item.type for item in whole.output] == ["message"]
    assert whole.output[0].status == "incomplete"
    assert whole.incomplete_details.reason is None
    assert whole.model_extra["broken_tool_call"].startswith('\n{"name": "get_weather"')
    events: list[Any] = [event async for event in await arranged.responses.create(stream=True, **fields)]
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == SCRIPTS["broken"]


async def test_without_parallel_calls_the_first_counts(arranged: AsyncOpenAI) -> None:
    fields: Any = {"model": "arranged", "input": "both", "tools": TOOLS, "parallel_tool_calls": False}
    whole = await arranged.responses.create(**fields)
    assert [item.name for item in whole.output if item.type == "function_call"] == ["get_weather"]
    assert whole.parallel_tool_calls is False


def codex_request(*items: Any) -> dict[str, Any]:
    """Return a request with the fields of Codex's `ResponsesApiRequest` (codex-rs), with shorter texts."""
    shell = {
        "command": {"type": "string", "description": "The script to run."},
        "workdir": {"type": "string"},
        "timeout_ms": {"type": "number"},
    }
    parameters = {"type": "object", "properties": shell, "required": ["command"], "additionalProperties": False}
    weather = {"type": "object", "properties": {}, "additionalProperties": False}
    patch = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
    return {
        "model": "arranged",
        "instructions": "You are a coding agent.",
        "input": [
            _said("developer", "<permissions instructions>Ask first.</permissions instructions>"),
            _said("user", "<environment_context><cwd>/tmp</cwd></environment_context>"),
            *items,
        ],
        "tools": [
            {
                "type": "function",
                "name": "shell_command",
                "description": "Run.",
                "strict": False,
                "parameters": parameters,
            },
            {"type": "function", "name": "get_weather", "description": "Ask.", "strict": False, "parameters": weather},
            {"type": "custom", "name": "apply_patch", "description": "Edit files.", "format": patch},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": None, "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199c8a4-session",
        "text": {"verbosity": "medium"},
        "client_metadata": {"x-codex-installation-id": "0"},
    }


def _said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


async def test_codex_calls_a_tool_and_goes_on(arranged_http: HttpClient) -> None:
    asked = _said("user", "ponder")
    events = await arranged_http.chunks(PATH, codex_request(asked))
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in items] == ["reasoning", "function_call"]
    assert events[-1]["type"] == "response.completed"
    result = {"type": "function_call_output", "call_id": items[1]["call_id"], "output": "sunny"}
    events = await arranged_http.chunks(PATH, codex_request(asked, *items, result))
    assert events[-1]["response"]["output"][-1]["content"][0]["text"] == SCRIPTS["sunny"]


async def test_tools_that_are_no_functions_are_named_as_ignored(arranged_http: HttpClient) -> None:
    response = await arranged_http.post(
        PATH, {"input": "hello", "tools": [*TOOLS, {"type": "web_search"}], "store": True}
    )
    assert response.status_code == 200
    assert response.headers["x-specd-ignored-fields"] == "store, tools[2]"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"n": 2}, "n"),
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call"}]}, "input[0].name"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ],
)
async def test_what_cannot_be_kept_is_refused(arranged_http: HttpClient, change: dict[str, Any], param: str) -> None:
    response = await arranged_http.post(PATH, {"input": "hello", **change})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_an_effort_begins_to_reason_where_the_template_can(arranged_http: HttpClient) -> None:
    response = await arranged_http.post(PATH, {"input": "hello", "reasoning": {"effort": "low"}})
    assert [item["type"] for item in response.json()["output"]] == ["reasoning", "message"]
    assert response.json()["reasoning"]["effort"] == "low"
    assert "x-specd-ignored-fields" not in response.headers
    response = await arranged_http.post(PATH, {"input": "hello", "reasoning": {"effort": "none"}})
    assert [item["type"] for item in response.json()["output"]] == ["message"]

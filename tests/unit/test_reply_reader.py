"""Content, reasoning and tool calls, however the text of a reply comes in pieces."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.generation import TextToken
from gateway.reply.format import Markers, ReplyFormat, detect_format
from gateway.reply.reader import Kind, Part, ReplyReader, Text
from gateway.reply.tool_parsers import ToolCall, ToolParser

TOOLS = ({"type": "function", "function": {"name": "f"}},)
JSON_CALLS = ToolParser("<tool_call>", "</tool_call>", lambda text, _: json.loads(text))
FORMAT = ReplyFormat(Markers("<think>", "</think>"), JSON_CALLS)
CALL = '<tool_call>{"name": "f", "arguments": {"x": "<think>"}}</tool_call>'
REPLY = f"<think>\nWhy? <tool_cal\n</think>\n\nI see < that.\n{CALL}\n{CALL} <thin"


def pieces_of(text: str, cuts: list[int]) -> list[TextToken]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [TextToken(5, text[i:j], "target") for i, j in itertools.pairwise(places)]


def read(reader: ReplyReader, tokens: list[TextToken], *, is_cut: bool = False) -> list[Part]:
    parts: list[Part] = []
    for token in tokens:
        parts += reader.push([token])
    return parts + reader.finish(is_cut=is_cut)


def texts(parts: list[Part]) -> dict[Kind, str]:
    joined: dict[Kind, str] = {Kind.CONTENT: "", Kind.REASONING: ""}
    for part in parts:
        if isinstance(part, Text):
            joined[part.kind] += part.text
    return joined


@given(st.lists(st.integers(0, 1000), max_size=60))
def test_parts_do_not_depend_on_the_pieces(cuts: list[int]) -> None:
    reader = ReplyReader(FORMAT, tools=TOOLS)
    parts = read(reader, pieces_of(REPLY, cuts))
    assert texts(parts) == {Kind.REASONING: "Why? <tool_cal\n", Kind.CONTENT: "I see < that.\n<thin"}
    calls = [part for part in parts if isinstance(part, ToolCall)]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("f", {"x": "<think>"})] * 2
    assert reader.num_calls == 2
    assert not reader.broken_call


@given(st.text(alphabet="<>/thinktool_c al\n", max_size=80), st.lists(st.integers(0, 1000), max_size=30))
def test_text_without_whole_markers_comes_out_as_it_went_in(text: str, cuts: list[int]) -> None:
    if any(marker in text for marker in ("<think>", "<tool_call>")):
        return
    assert texts(read(ReplyReader(FORMAT, tools=TOOLS), pieces_of(text, cuts)))[Kind.CONTENT] == text


@given(st.integers(0, len(CALL) - 1))
def test_a_part_of_a_call_never_is_text(cut: int) -> None:
    reader = ReplyReader(FORMAT, tools=TOOLS)
    parts = read(reader, pieces_of(CALL[:cut], list(range(cut))), is_cut=True)
    is_begun = cut >= len("<tool_call>")
    assert texts(parts)[Kind.CONTENT] == ("" if is_begun else CALL[:cut])
    assert reader.broken_call == (CALL[len("<tool_call>") : cut] if is_begun else "")
    assert reader.num_calls == 0


def test_a_template_can_begin_the_reasoning() -> None:
    assert FORMAT.begins_in_reasoning("user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n")
    assert not FORMAT.begins_in_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not FORMAT.begins_in_reasoning("<|im_start|>assistant\n")
    reader = ReplyReader(FORMAT, begins_in_reasoning=True)
    parts = read(reader, pieces_of("It is so.</think>\n\nYes.", [3, 12]))
    assert texts(parts) == {Kind.REASONING: "It is so.", Kind.CONTENT: "Yes."}


def test_special_tokens_are_markers_though_texts_leave_them_out() -> None:
    special = {1: "[TOOL_CALLS]", 2: "[ARGS]", 3: "</s>", 4: "[IMG]"}
    parser = ToolParser(
        "[TOOL_CALLS]", "", lambda text, _: dict(zip(("name", "arguments"), text.split("[ARGS]"), strict=True))
    )
    reader = ReplyReader(ReplyFormat(None, parser), tools=TOOLS, special_tokens=special)
    tokens = [
        TextToken(i, text, "target")
        for i, text in ((9, "Look."), (4, ""), (1, ""), (9, "f"), (2, ""), (9, "{}"), (3, ""))
    ]
    parts = reader.push(tokens, is_last=True) + reader.finish(is_cut=False)
    content, call = parts
    assert content == Text(Kind.CONTENT, "Look.")
    assert isinstance(call, ToolCall)
    assert (call.name, call.arguments) == ("f", "{}")


@pytest.mark.parametrize("arguments", [None, 3, "text"])
def test_what_a_parser_returns_is_checked(arguments: Any) -> None:
    parser = ToolParser("<a>", "</a>", lambda text, _: {"name": arguments, "arguments": {}})
    reader = ReplyReader(ReplyFormat(None, parser), tools=TOOLS)
    parts = read(reader, pieces_of("<a>x</a>", []))
    if arguments == "text":
        assert reader.num_calls == 1
    else:
        assert not parts
        assert reader.broken_call == "x"


def test_the_form_is_seen_in_the_template() -> None:
    qwen = "{{ '<tool_call>' + tool_call.name }} {{ content.split('</think>') }}"
    assert detect_format(qwen, {}).reasoning == Markers("<think>", "</think>")
    assert detect_format("{{ messages }}", {}) == ReplyFormat()
    assert detect_format("", {1: "<|channel>thought", 2: "<channel|>"}).reasoning == Markers(
        "<|channel>thought", "<channel|>"
    )

"""Content, reasoning and tool calls, however the text of a reply comes in pieces."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.reply import cutter
from gateway.reply.format import ReplyFormat, detect_format
from gateway.reply.forms import Markers
from gateway.reply.parts import Kind, Part, Text
from gateway.reply.reader import ReplyReader
from gateway.reply.tool_parsers import JSON_STRINGS, ToolCall, ToolParser
from specd.client import CompletionToken
from specd.vocabulary import TokenSource

TOOLS = ({"type": "function", "function": {"name": "f"}},)
JSON_CALLS = ToolParser("<tool_call>", "</tool_call>", lambda text, _: json.loads(text), JSON_STRINGS)
STRINGS = {**JSON_STRINGS, "<v>": ("</v>",)}
FORMAT = ReplyFormat(Markers("<think>", "</think>"), JSON_CALLS)
CALL = '<tool_call>{"name": "f", "arguments": {"x": "<think>"}}</tool_call>'
REPLY = f"<think>\nWhy? <tool_cal\n</think>\n\nI see < that.\n{CALL}\n{CALL} <thin"


def pieces_of(text: str, cuts: list[int]) -> list[CompletionToken]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [CompletionToken(5, text[i:j], TokenSource.TARGET) for i, j in itertools.pairwise(places)]


def read(reader: ReplyReader, tokens: list[CompletionToken], *, is_cut: bool = False) -> list[Part]:
    parts: list[Part] = []
    for token in tokens:
        parts += reader.push([token])
    return parts + reader.finish(is_cut=is_cut)


def calls_of(parts: list[Part]) -> list[tuple[str, Any]]:
    return [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, ToolCall)]


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
    assert calls_of(parts) == [("f", {"x": "<think>"})] * 2
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
    reader = ReplyReader(FORMAT, prompt_end="<|im_start|>assistant\n<think>\n")
    parts = read(reader, pieces_of("It is so.</think>\n\nYes.", [3, 12]))
    assert texts(parts) == {Kind.REASONING: "It is so.", Kind.CONTENT: "Yes."}


def test_special_tokens_are_markers_though_texts_leave_them_out() -> None:
    special = {1: "[TOOL_CALLS]", 2: "[ARGS]", 3: "</s>", 4: "[IMG]"}
    parser = ToolParser(
        "[TOOL_CALLS]", "", lambda text, _: dict(zip(("name", "arguments"), text.split("[ARGS]"), strict=True))
    )
    reader = ReplyReader(ReplyFormat(None, parser), tools=TOOLS, special_tokens=special)
    tokens = [
        CompletionToken(i, text, TokenSource.TARGET)
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
        assert parts == [Text(Kind.CONTENT, "<a>x</a>")]
        assert reader.broken_call == "x"


def test_the_form_is_seen_in_the_template() -> None:
    qwen = "{{ '<tool_call>' + tool_call.name }} {{ content.split('</think>') }}"
    assert detect_format(qwen, {}).reasoning == Markers("<think>", "</think>")
    assert detect_format("{{ messages }}", {}) == ReplyFormat()
    assert detect_format("", {1: "<|channel>thought", 2: "<channel|>"}).reasoning == Markers(
        "<|channel>thought", "<channel|>"
    )


def test_the_name_of_the_arguments_can_be_parameters() -> None:
    for written in (
        '{"name": "f", "parameters": {"city": "Bern"}}',
        '{"function": "f", "parameters": {"city": "Bern"}}',
        '{"type": "function", "function": {"name": "f", "arguments": {"city": "Bern"}}}',
        '{"name": "f", "arguments": "{\\"city\\": \\"Bern\\"}"}',
    ):
        reader = ReplyReader(FORMAT, tools=TOOLS)
        assert calls_of(read(reader, pieces_of(f"<tool_call>{written}</tool_call>", []))) == [("f", {"city": "Bern"})]


@pytest.mark.parametrize(
    "written",
    [
        '{"name": "f", "args": {"city": "Bern"}}',
        '{"name": "f", "arguments": ["Bern"]}',
        '{"name": "f", "arguments": "Bern"}',
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f g", "arguments": {}}',
        '{"arguments": {}}',
        "[]",
    ],
)
def test_a_call_that_says_something_else_is_broken_and_visible(written: str) -> None:
    reader = ReplyReader(FORMAT, tools=TOOLS)
    reply = f"<tool_call>{written}</tool_call> So."
    assert texts(read(reader, pieces_of(reply, [])))[Kind.CONTENT] == reply
    assert reader.broken_call == written
    assert reader.finish_reason("stop") == "length"


def test_a_call_without_arguments_has_none() -> None:
    reader = ReplyReader(FORMAT, tools=TOOLS)
    assert calls_of(read(reader, pieces_of('<tool_call>{"name": "f"}</tool_call>', []))) == [("f", {})]


@given(st.lists(st.integers(0, 1000), max_size=20))
def test_a_marker_in_a_string_of_an_argument_is_text(cuts: list[int]) -> None:
    said = 'a </tool_call> \\" </tool_call> b'
    call = f"<tool_call>{json.dumps({'name': 'f', 'arguments': {'x': said}})}</tool_call>"
    reader = ReplyReader(FORMAT, tools=TOOLS)
    assert calls_of(read(reader, pieces_of(f"{call}{call}", cuts))) == [("f", {"x": said})] * 2


@given(st.lists(st.integers(0, 1000), max_size=20))
def test_a_string_that_does_not_close_ends_with_its_call(cuts: list[int]) -> None:
    broken = '<tool_call>{"name": "f, "arguments": {}}</tool_call>'
    reader = ReplyReader(FORMAT, tools=TOOLS)
    parts = read(reader, pieces_of(f"{broken}So.\n{CALL}\nThen.", cuts))
    assert calls_of(parts) == [("f", {"x": "<think>"})]
    assert texts(parts)[Kind.CONTENT] == f"{broken}So.\nThen."
    assert reader.broken_call == '{"name": "f, "arguments": {}}'


@given(st.lists(st.integers(0, 1000), max_size=20))
def test_reasoning_begins_a_reply(cuts: list[int]) -> None:
    said = "Use the <think> tag in XML, and </think> behind it."
    assert texts(read(ReplyReader(FORMAT, tools=TOOLS), pieces_of(said, cuts))) == {
        Kind.REASONING: "",
        Kind.CONTENT: said,
    }
    parts = read(ReplyReader(FORMAT), pieces_of(f"\n<think>Hm.</think>\n{said}", cuts))
    assert texts(parts) == {Kind.REASONING: "Hm.", Kind.CONTENT: said}
    parts = read(ReplyReader(FORMAT), pieces_of("<think>Hm.</think>\n<think> is a tag.", cuts))
    assert texts(parts) == {Kind.REASONING: "Hm.", Kind.CONTENT: "<think> is a tag."}


@given(st.lists(st.integers(0, 1000), max_size=20))
def test_a_call_at_the_end_of_a_reasoning_without_an_end_is_one(cuts: list[int]) -> None:
    reply = f"<think>\nI look.\n{CALL}\n{CALL}\n"
    reader = ReplyReader(FORMAT, tools=TOOLS)
    parts = read(reader, pieces_of(reply, cuts))
    assert calls_of(parts) == [("f", {"x": "<think>"})] * 2
    assert texts(parts) == {Kind.REASONING: "I look.\n", Kind.CONTENT: ""}
    assert reader.finish_reason("stop") == "tool_calls"

    for rest in ("No.", "</think>", "\n</think>So.", "<tool_call>{"):
        reader = ReplyReader(FORMAT, tools=TOOLS)
        parts = read(reader, pieces_of(f"<think>I look. {CALL}{rest}", cuts))
        assert not calls_of(parts)
        thought, _, answer = f"I look. {CALL}{rest}".partition("</think>")
        assert texts(parts) == {Kind.REASONING: thought, Kind.CONTENT: answer}
    reader = ReplyReader(FORMAT, tools=TOOLS)
    parts = read(reader, pieces_of(reply, cuts), is_cut=True)
    assert not calls_of(parts)  # its reasoning may have continued
    assert texts(parts)[Kind.REASONING] == reply.removeprefix("<think>\n")


def test_at_most_so_many_calls_are_read() -> None:
    reader = ReplyReader(FORMAT, tools=TOOLS, max_calls=1)
    assert len(calls_of(read(reader, pieces_of(f"{CALL}\n{CALL}", [])))) == 1
    assert reader.num_calls == 1


def test_json_without_a_marker_is_a_call_if_it_names_a_function() -> None:
    llama = detect_format("<|python_tag|>", {})
    for said in ('{"answer": 42}', '{"name": "g", "parameters": {}}', "[1, 2]", '{"name": "f", "para', "{", "Say {x}."):
        parts = read(ReplyReader(llama, tools=TOOLS), pieces_of(said, [1, 5]))
        assert (calls_of(parts), texts(parts)[Kind.CONTENT]) == ([], said)
    reader = ReplyReader(llama, tools=TOOLS)
    assert calls_of(read(reader, pieces_of('{"name": "f", "parameters": {"x": 1}}', [1, 5]))) == [("f", {"x": 1})]


def test_a_harmony_call_is_of_a_function_that_is_offered() -> None:
    harmony = detect_format("<|channel|> <|message|> <|start|>assistant", {})
    said = "<|channel|>commentary to=python<|message|>print(1)"
    reader = ReplyReader(harmony, tools=TOOLS, prompt_end="<|start|>assistant")
    parts = read(reader, pieces_of(f"{said}<|call|>", [9]))
    assert (calls_of(parts), texts(parts)[Kind.CONTENT]) == ([], f"{said}<|call|>")
    assert reader.finish_reason("stop") == "length"
    assert reader.broken_call == "print(1)"
    # A message that a prompt has begun continues.
    reader = ReplyReader(harmony, prompt_end="<|start|>assistant<|channel|>analysis<|message|>Well,")
    parts = read(reader, pieces_of(" yes.<|end|><|start|>assistant<|channel|>final<|message|>Yes.", [9]))
    assert texts(parts) == {Kind.REASONING: " yes.", Kind.CONTENT: "Yes."}


def searched(monkeypatch: pytest.MonkeyPatch, reply: str) -> int:
    """Return how many characters are searched for markers in a reply that comes in pieces."""
    counted = 0

    class Counting:
        def __init__(self, pattern: re.Pattern[str]) -> None:
            self._pattern = pattern

        def search(self, text: str, start: int) -> re.Match[str] | None:
            nonlocal counted
            match = self._pattern.search(text, start)
            counted += (match.end() if match is not None else len(text)) - start
            return match

    with monkeypatch.context() as patch:
        pattern_of = cutter._pattern
        patch.setattr(cutter, "_pattern", lambda markers: Counting(pattern_of(markers)))
        reader = ReplyReader(ReplyFormat(FORMAT.reasoning, replace(JSON_CALLS, quotes=STRINGS)), tools=TOOLS)
        for at in range(0, len(reply), 64):
            reader.push([CompletionToken(5, reply[at : at + 64], TokenSource.TARGET)])
        reader.finish(is_cut=False)
    return counted


@pytest.mark.parametrize(
    "said",
    [
        pytest.param('<tool_call>{"</tool_call>', id="strings that another call closes"),
        pytest.param("<tool_call><v></tool_call>", id="strings that do not close"),
        pytest.param("<tool_call>", id="calls that do not end"),
        pytest.param("</tool_call>", id="ends without a beginning"),
        pytest.param(f"<think>{CALL}", id="calls in a reasoning"),
        pytest.param('<tool_call>{"a": "', id="strings that open and close"),
        pytest.param("<", id="beginnings of markers"),
    ],
)
def test_the_work_on_a_reply_grows_no_faster_than_its_length(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    assert searched(monkeypatch, said * 4000) < 5 * searched(monkeypatch, said * 1000)


@pytest.mark.parametrize("ended", ["</tool_call>", ""])
@pytest.mark.parametrize(
    ("template", "call"),
    [
        ("<arg_key>", "<tool_call>f<arg_key>x</arg_key><arg_value>and"),
        ("<tool_call>\n<function=", "<tool_call><function=f><parameter=x>and"),
    ],
)
def test_a_call_whose_argument_does_not_end_is_broken(template: str, call: str, ended: str) -> None:
    reader = ReplyReader(detect_format(template, {}), tools=TOOLS)
    parts = read(reader, pieces_of(call + ended, [3, 20]))
    assert (calls_of(parts), texts(parts)[Kind.CONTENT]) == ([], call + ended)
    assert reader.finish_reason("stop") == "length"

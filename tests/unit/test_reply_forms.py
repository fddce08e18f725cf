"""A model's reply in each known form is parsed correctly, for any division into pieces."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.reply.format import ReplyFormat, detect_format
from gateway.reply.forms import TOOLS as TOOL_FORMS
from gateway.reply.forms import ToolForm
from gateway.reply.parts import Kind, Part, Text, joined
from gateway.reply.reader import ReplyReader
from gateway.reply.tool_parsers import ToolCall
from specd.client import CompletionToken
from specd.vocabulary import TokenSource
from tests.unit.reply_forms import FORMS, TOOLS, Form, pieces

TEXT = 1  # the id of tokens that are no special ones


def tokens_of(reply: str, cuts: list[int], *, have_special: bool) -> tuple[list[CompletionToken], dict[int, str]]:
    """Return a reply as tokens, cut at some places; markers are special tokens, without a text, or text."""
    ids: dict[str, int] = {}
    tokens: list[CompletionToken] = []
    for piece, is_special in pieces(reply):
        if is_special and have_special:
            token_id = ids.setdefault(piece, len(ids) + 2)
            tokens.append(CompletionToken(token_id, "", TokenSource.TARGET))
        else:
            tokens.append(CompletionToken(TEXT, piece, TokenSource.TARGET))
    if not have_special:
        tokens = [CompletionToken(TEXT, "".join(token.text for token in tokens), TokenSource.TARGET)]
    cut: list[CompletionToken] = []
    for token in tokens:
        places = sorted({0, len(token.text), *(place % (len(token.text) + 1) for place in cuts)})
        texts = [token.text[i:j] for i, j in itertools.pairwise(places)] or [""]
        cut += [CompletionToken(token.id, text, TokenSource.TARGET) for text in texts]
    return cut, {token_id: piece for piece, token_id in ids.items()}


def read(
    form: Form, reply: str, cuts: list[int], *, have_special: bool, **options: Any
) -> tuple[list[Part], ReplyReader]:
    tokens, special = tokens_of(reply, cuts, have_special=have_special)
    reader = ReplyReader(
        detect_format(form.template, {}),
        **{"tools": TOOLS, "special_tokens": special, "prompt_end": form.prompt_end, **options},
    )
    parts: list[Part] = []
    for token in tokens:
        parts += reader.push([token])
    return joined(parts + reader.finish(is_cut=False)), reader


def meant(parts: list[Part]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return the reasoning, the content and the calls."""
    reasoning, content = (
        "".join(part.text for part in parts if isinstance(part, Text) and part.kind is kind)
        for kind in (Kind.REASONING, Kind.CONTENT)
    )
    calls = [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, ToolCall)]
    return reasoning, content, calls


words = st.lists(st.sampled_from(["a", "é", " ", '"', "'", "\\", "{", "<", "</", "[", "\n", "<think>"]), max_size=8)
texts = words.map(lambda pieces: f"I{''.join(pieces)}.")


def values(form: Form) -> st.SearchStrategy[str]:
    harmless = st.sampled_from(["a", "é", " ", '"', "'", "\\", "{", "}", ",", form.end])
    return st.lists(harmless, max_size=6).map(lambda pieces: f"x{''.join(pieces)}y")


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=20)
@given(data=st.data())
def test_what_is_written_is_read(name: str, data: st.DataObject) -> None:
    form = FORMS[name]
    reasoning = data.draw(texts) if form.write_reasoning is not None else ""
    called = st.fixed_dictionaries({"path": values(form)}, optional={"size": st.integers(-9, 999)})
    call = st.tuples(st.sampled_from(["write", "get_time"]), called)
    calls = data.draw(st.lists(call, max_size=form.max_calls if form.write_calls is not None else 0))
    # A call without a marker is the whole answer.
    has_content = not calls or detect_format(form.template, {}).tools is None or not name.startswith("Llama")
    content = data.draw(texts) if has_content else ""
    reply = form.write_reasoning(reasoning) if form.write_reasoning is not None else ""
    reply += form.write_content(content) if content else ""
    reply += form.write_calls(calls) if calls and form.write_calls is not None else ""
    cuts, have_special = data.draw(st.lists(st.integers(0, 500), max_size=12)), data.draw(st.booleans())

    parts, reader = read(form, reply, cuts, have_special=have_special)
    assert meant(parts) == (reasoning, content, calls)
    assert reader.finish_reason("stop") == ("tool_calls" if calls else "stop")
    assert not reader.broken_call
    ids = [part.call_id for part in parts if isinstance(part, ToolCall)]
    assert len(set(ids)) == len(ids)


UNITS = (
    *("call:f{", '<|"|>', "<arg_key>", "<arg_key>a</arg_key>", "f<arg_key>a</arg_key><arg_value>", "<function="),
    *("<parameter=", "<function=f><parameter=a>", '<invoke name="a">', '<parameter name="a">', '"f">', "a[ARGS]"),
    *('<param name="a">', '<atem:invoke name="a">', '<atem:parameter name="a">', "<|open|>call<|sep|>", "[f(", "{"),
    *("<|tool_call_begin|>", '<｜DSML｜invoke name="a">', "<longcat_arg_key>a</longcat_arg_key>", "[CALL_ID]a"),
)


@pytest.mark.parametrize("form", TOOL_FORMS, ids=lambda form: form.name)
def test_a_long_body_that_is_no_call_is_refused_at_once(form: ToolForm) -> None:
    """At 100 kB, what takes quadratic time takes minutes."""
    if (parser := form.load()) is None:
        return
    for unit in UNITS:
        reader = ReplyReader(ReplyFormat(tools=parser), tools=TOOLS)
        body = unit * (100_000 // len(unit))
        parts = reader.push([CompletionToken(TEXT, f"{parser.start}{body}{parser.end}", TokenSource.TARGET)])
        parts += reader.finish(is_cut=False)
        assert reader.num_calls <= 1

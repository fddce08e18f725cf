"""A reply as it comes: its content, its reasoning, and the tools that it calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gateway.reply.format import ReplyFormat
from gateway.reply.harmony import HarmonyReader
from gateway.reply.parts import BrokenCall, Found, Kind, Part, Text, joined
from gateway.reply.sections import SectionReader
from gateway.reply.tool_parsers import ToolCall, load_parser
from specd.client import CompletionToken


class _TextReader(Protocol):
    kind: Kind

    def means(self, special: str) -> bool: ...

    def read(self, text: str) -> list[Found]: ...

    def finish(self, *, is_cut: bool) -> list[Found]: ...


class ReplyReader:
    """Tells the parts of a reply from one another, as its tokens come.

    A broken call is part of the content. A call that the end of the reply cuts off is not. After
    `finish`, `num_calls` and `num_reasoning_tokens` say how much there was, `broken_call` is the first that was no
    call, and `is_broken` says that it was not only cut off.
    """

    def __init__(
        self,
        reply_format: ReplyFormat,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        special_tokens: Mapping[int, str] | None = None,
        prompt_end: str = "",
        max_calls: int | None = None,
    ) -> None:
        """Read the reply to a prompt with this end; without `tools`, what looks like a call is text.

        Only the first `max_calls` calls count.
        """
        self._special_tokens = special_tokens or {}
        self._max_calls = max_calls
        self._text = _text_reader(reply_format, tools, prompt_end)
        self.num_calls = 0
        self.num_reasoning_tokens = 0
        self.broken_call = ""
        self.is_broken = False

    def push(self, tokens: Sequence[CompletionToken], *, is_last: bool = False) -> list[Part]:
        """Return the parts that these tokens complete; at the end of a reply, its last token can be an end token."""
        found: list[Found] = []
        for i, token in enumerate(tokens):
            self.num_reasoning_tokens += self._text.kind is Kind.REASONING
            special = self._special_tokens.get(token.id, "")
            if special and not token.text and not (is_last and i == len(tokens) - 1) and self._text.means(special):
                found += self._text.read(special)
            elif token.text:
                found += self._text.read(token.text)
        return self._parts(found)

    def finish(self, *, is_cut: bool) -> list[Part]:
        """Return what was held back, at the end of the reply; `is_cut` if the model had more to say."""
        return self._parts(self._text.finish(is_cut=is_cut))

    def finish_reason(self, reason: str) -> str:
        """Return the finish reason of OpenAI's for the one of the generation, `stop` or `length`, after `finish`.

        A reply whose only call is broken has `length`: of OpenAI's reasons, it alone says that a reply is not whole.
        """
        if reason != "stop":
            return reason
        return "tool_calls" if self.num_calls else "length" if self.is_broken else "stop"

    def _parts(self, found: Sequence[Found]) -> list[Part]:
        parts: list[Part] = []
        for each in found:
            if isinstance(each, BrokenCall):
                self.broken_call = self.broken_call or each.body
                if not each.is_cut:
                    self.is_broken = True
                    parts.append(Text(Kind.CONTENT, each.raw))
            elif isinstance(each, Text):
                parts.append(each)
            elif self._max_calls is None or self.num_calls < self._max_calls:
                self.num_calls += 1
                parts.append(each)
        return joined(parts)


def _text_reader(reply_format: ReplyFormat, tools: Sequence[Mapping[str, Any]], prompt_end: str) -> _TextReader:
    parser = reply_format.tools if tools else None
    if (channels := reply_format.channels) is not None:
        parser = load_parser(channels.parser) if channels.parser and tools else None

    def parse(text: str) -> list[ToolCall]:
        assert parser is not None
        return parser.parse(text, tools)

    if channels is not None:
        names = {tool["function"]["name"] for tool in tools}
        return HarmonyReader(names, parse if parser is not None else None, prompt_end)
    begins_in_reasoning = reply_format.begins_in_reasoning(prompt_end)
    return SectionReader(reply_format, parser, parse, begins_in_reasoning=begins_in_reasoning)

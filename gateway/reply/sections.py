"""Replies in which markers begin and end the reasoning and the calls of tools."""

from __future__ import annotations

from collections.abc import Callable

from gateway.reply.cutter import CallBody, Cutter
from gateway.reply.format import ReplyFormat
from gateway.reply.parts import BrokenCall, Found, Kind, Text
from gateway.reply.tool_parsers import ToolCall, ToolParser

Parse = Callable[[str], list[ToolCall]]


class SectionReader:
    """Tells the parts of a reply from one another, as its text comes.

    Reasoning begins a reply, or follows a call: a marker of it anywhere else is text. Text that may be the beginning of
    a marker is held back, and so is a call until it is whole.
    """

    def __init__(
        self, reply_format: ReplyFormat, parser: ToolParser | None, parse: Parse, *, begins_in_reasoning: bool
    ) -> None:
        """Read replies in this form; without a parser, what looks like a call is text."""
        self._format = reply_format
        self._parser = parser
        self._bare = parser.bare if parser is not None else ()
        self._parse = parse
        self.kind = Kind.REASONING if begins_in_reasoning else Kind.CONTENT
        self._cutter = Cutter()
        self._body: CallBody | None = None
        self._trusts_strings = True
        # Whether nothing has been said since the reply, or a section of it, began: only white space, which is held.
        self._is_at_start = True
        self._may_reason = not begins_in_reasoning
        self._strips = begins_in_reasoning
        self._blank = ""
        # Calls at the end of the reasoning, and their text, until it is known whether the reply ends there.
        self._calls_in_reasoning: list[ToolCall] = []
        self._held_reasoning: list[str] = []
        self._wrapper_end = ""  # what ends the content, once that has begun in a wrapper
        self._held_wrapper_end = ""

    def means(self, special: str) -> bool:
        """Whether a special token, which texts leave out, says something of the form of the reply."""
        return self._body is not None or any(special in marker for marker in self._markers())

    def read(self, text: str) -> list[Found]:
        """Return the parts that this text completes."""
        self._cutter.add(text)
        return self._advance()

    def finish(self, *, is_cut: bool) -> list[Found]:
        """Return what was held back, at the end of the reply; `is_cut` if the model had more to say."""
        parts: list[Found] = []
        if self._body is not None:
            self._body.add(self._cutter.rest())
            if is_cut and self._body.first_end is None:
                parts += self._cut_call(self._body)
            else:
                parts += self._end_call()
                parts += self._advance()  # of a call that ended sooner, there is a rest
                return parts + self.finish(is_cut=is_cut)
        parts += self._say(self._cutter.rest())
        if self._calls_in_reasoning and not is_cut:
            parts += self._calls_in_reasoning
        elif self._held_reasoning:
            parts.append(Text(Kind.REASONING, "".join(self._held_reasoning)))
        elif self.kind is Kind.CONTENT and self._blank:
            parts.append(Text(Kind.CONTENT, self._blank))
        return parts

    def _markers(self) -> tuple[str, ...]:
        """Return the markers that mean something where the reply is now."""
        reasoning, parser = self._format.reasoning, self._parser
        calls = (parser.start,) if parser is not None and parser.start else ()
        if self.kind is Kind.REASONING:
            return (reasoning.end, *calls) if reasoning is not None else ()
        markers = (*calls, *self._format.dropped, *((self._wrapper_end,) if self._wrapper_end else ()))
        if not self._is_at_start:
            return markers
        wrapper = self._format.wrapper
        thoughts = (reasoning.start,) if reasoning is not None and self._may_reason else ()
        return (*markers, *self._bare, *thoughts, *((wrapper.start,) if wrapper is not None else ()))

    def _advance(self) -> list[Found]:
        parts: list[Found] = []
        while True:
            if self._body is not None:
                if not self._body.read(self._cutter):
                    return parts
                parts += self._end_call()
                continue
            text, marker = self._cutter.cut(self._markers())
            parts += self._say(text)
            if not marker:
                return parts
            parts += self._meet(marker)

    def _say(self, text: str) -> list[Found]:
        if self._strips:  # templates write new lines beside the markers, which are no part of what is said
            text = text.lstrip()
        if not text:
            return []
        if self.kind is Kind.REASONING and self._held_reasoning:
            self._held_reasoning.append(text)
            return [] if text.isspace() else self._release_reasoning()
        if self._is_at_start and text.isspace() and self.kind is Kind.CONTENT:
            self._blank += text
            return []
        text, self._blank = f"{self._blank}{self._held_wrapper_end}{text}", ""
        self._strips, self._is_at_start, self._held_wrapper_end = False, False, ""
        return [Text(self.kind, text)]

    def _meet(self, marker: str) -> list[Found]:
        reasoning, parser, wrapper = self._format.reasoning, self._parser, self._format.wrapper
        if reasoning is not None and marker == reasoning.end and self.kind is Kind.REASONING:
            parts = self._release_reasoning()
            self._begin(Kind.CONTENT)
            return parts
        if parser is not None and marker == parser.start:
            breaks = (reasoning.end,) if self.kind is Kind.REASONING and reasoning is not None else ()
            self._begin_call(marker, breaks)
        elif marker in self._format.dropped:
            pass
        elif marker == self._wrapper_end:
            self._held_wrapper_end += marker  # no part of the content if nothing follows
        elif not self._is_at_start:  # of a piece of text that said something before it
            return self._say(marker)
        elif reasoning is not None and marker == reasoning.start:
            self._begin(Kind.REASONING)
        elif wrapper is not None and marker == wrapper.start:
            self._wrapper_end, self._strips = wrapper.end, True
        else:
            self._begin_call(marker)
        return []

    def _begin(self, kind: Kind, *, may_reason: bool = False) -> None:
        self.kind, self._may_reason = kind, may_reason
        self._strips, self._is_at_start, self._blank = True, True, ""

    def _begin_call(self, marker: str, breaks: tuple[str, ...] = ()) -> None:
        assert self._parser is not None
        ends = (self._parser.end,) if self._parser.end and marker not in self._bare else ()
        self._body = CallBody(marker, ends, self._parser.quotes if self._trusts_strings else {}, breaks)

    def _end_call(self) -> list[Found]:
        body, self._body = self._body, None
        assert body is not None
        if self.kind is Kind.REASONING:
            return self._end_call_in_reasoning(body)
        try:
            return self._called(body, body.text)
        except ValueError:
            if body.begun in self._bare:
                return self._say(body.raw)
        if body.first_end is None:
            return self._broken(body.begun, body.text, body.ended)
        # A string did not close: the first marker that ends calls was meant.
        before, behind = body.first_end
        self._trusts_strings = False  # once more at most, so that time is linear
        self._cutter.put_back(f"{body.text[behind:]}{body.ended}")
        try:
            return self._called(body, body.text[:before])
        except ValueError:
            return self._broken(body.begun, body.text[:before], body.text[before:behind])

    def _called(self, body: CallBody, text: str) -> list[Found]:
        if body.is_in_value:  # some parsers would leave out the argument
            raise ValueError("the value of an argument does not end")
        calls = self._parse(f"{body.begun}{text}" if body.begun in self._bare else text)
        self._begin(Kind.CONTENT, may_reason=True)
        return [*calls]

    def _broken(self, begun: str, text: str, ended: str) -> list[Found]:
        self._say(begun)  # as the content that it is part of
        return [BrokenCall(text, f"{begun}{text}{ended}")]

    def _cut_call(self, body: CallBody) -> list[Found]:
        self._body = None
        if self.kind is Kind.REASONING:
            self._held_reasoning.append(body.raw)
            return self._release_reasoning()
        if body.begun in self._bare:  # it may be any JSON
            return self._say(body.raw)
        return [BrokenCall(body.text, body.raw, is_cut=True)]

    def _end_call_in_reasoning(self, body: CallBody) -> list[Found]:
        """Hold a call that the reasoning ends with: it is one if the reply ends there too."""
        assert self._parser is not None
        self._strips = False
        is_broken_off = bool(body.ended) and body.ended != self._parser.end
        self._held_reasoning.append(f"{body.begun}{body.text}{'' if is_broken_off else body.ended}")
        if is_broken_off:
            return self._meet(body.ended)
        try:
            self._calls_in_reasoning += self._parse(body.text)
        except ValueError:
            return self._release_reasoning()
        return []

    def _release_reasoning(self) -> list[Found]:
        held, self._held_reasoning, self._calls_in_reasoning = self._held_reasoning, [], []
        return [Text(Kind.REASONING, "".join(held))] if held else []

"""A reply as it comes: its content, its reasoning, and the tools that it calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gateway.generation import TextToken
from gateway.reply.format import ReplyFormat
from gateway.reply.tool_parsers import ToolCall


class Kind(Enum):
    """What a piece of text belongs to."""

    CONTENT = "content"
    REASONING = "reasoning_content"
    CALL = "tool_calls"


@dataclass(frozen=True)
class Text:
    """A piece of the content, or of the reasoning."""

    kind: Kind
    text: str


Part = Text | ToolCall


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with neighbours of one kind as one."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Text) and isinstance(last, Text) and part.kind is last.kind:
            joined[-1] = Text(part.kind, last.text + part.text)
        else:
            joined.append(part)
    return joined


class ReplyReader:
    """Tells the parts of a reply from one another, as its tokens come.

    Text that may be the beginning of a marker is held back. A tool call is held back until it is whole: a part of one
    never comes out as text. After `finish`, `num_calls` and `num_reasoning_tokens` say how much there was, and
    `broken_call` is what was no call in spite of its marker.
    """

    def __init__(
        self,
        reply_format: ReplyFormat,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        special_tokens: Mapping[int, str] | None = None,
        begins_in_reasoning: bool = False,
    ) -> None:
        """Read replies in this form; without `tools`, what looks like a call is text."""
        self._reasoning = reply_format.reasoning
        self._parser = reply_format.tools if tools else None
        self._tools = tools
        self._special_tokens = special_tokens or {}
        self._kind = Kind.REASONING if begins_in_reasoning else Kind.CONTENT
        self._held = ""
        self._strips = begins_in_reasoning
        self.num_calls = 0
        self.num_reasoning_tokens = 0
        self.broken_call = ""

    @property
    def is_in_call(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._kind is Kind.CALL

    def push(self, tokens: Sequence[TextToken], *, is_last: bool = False) -> list[Part]:
        """Return the parts that these tokens complete; at the end of a reply, its last token can be an end token."""
        parts: list[Part] = []
        for i, token in enumerate(tokens):
            self.num_reasoning_tokens += self._kind is Kind.REASONING
            special = self._special_tokens.get(token.token_id, "")
            if special and not token.text and not (is_last and i == len(tokens) - 1) and self._means(special):
                parts += self._read(special)
            elif token.text:
                parts += self._read(token.text)
        return _joined(parts)

    def finish(self, *, is_cut: bool) -> list[Part]:
        """Return what was held back, at the end of the reply; `is_cut` if the model had more to say."""
        held, self._held = self._held, ""
        if self._kind is not Kind.CALL:
            return self._text(held)
        if is_cut:
            self.broken_call = held
            return []
        self._kind = Kind.CONTENT
        return self._calls(held)  # whose end marker is the end of the reply, or was forgotten

    def _means(self, special: str) -> bool:
        """Whether a special token, which texts leave out, says something of the form of the reply."""
        if self._kind is Kind.CALL:
            return True
        return any(special in marker for marker, _ in self._markers())

    def _markers(self) -> list[tuple[str, Kind]]:
        """Return what can come next, and what it begins."""
        if self._kind is Kind.REASONING:
            return [(self._reasoning.end, Kind.CONTENT)] if self._reasoning is not None else []
        markers = []
        if self._reasoning is not None:
            markers.append((self._reasoning.start, Kind.REASONING))
        if self._parser is not None:
            markers.append((self._parser.start, Kind.CALL))
        return markers

    def _read(self, text: str) -> list[Part]:
        searched = max(len(self._held) - len(self._parser.end), 0) if self._parser is not None else 0
        self._held += text
        parts: list[Part] = []
        while True:
            if self._kind is Kind.CALL:
                assert self._parser is not None
                end = self._held.find(self._parser.end, searched) if self._parser.end else -1
                if end < 0:
                    return parts
                call, self._held = self._held[:end], self._held[end + len(self._parser.end) :]
                self._kind, self._strips = Kind.CONTENT, True
                parts += self._calls(call)
                continue
            found = [(at, marker, kind) for marker, kind in self._markers() if (at := self._held.find(marker)) >= 0]
            if not found:
                break
            at, marker, kind = min(found, key=lambda each: each[0])
            before, self._held = self._held[:at], self._held[at + len(marker) :]
            parts += self._text(before)
            self._kind, self._strips, searched = kind, True, 0
        kept = self._num_held()
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return parts + self._text(shown)

    def _num_held(self) -> int:
        """Return how many characters at the end may begin a marker."""
        held = self._held
        longest = max((len(marker) - 1 for marker, _ in self._markers()), default=0)
        return next(
            (
                n
                for n in range(min(longest, len(held)), 0, -1)
                if any(marker.startswith(held[-n:]) for marker, _ in self._markers())
            ),
            0,
        )

    def _text(self, text: str) -> list[Part]:
        if self._strips:  # templates write new lines beside the markers, which are no part of what is said
            text = text.lstrip()
            self._strips = not text
        return [Text(self._kind, text)] if text else []

    def _calls(self, text: str) -> list[Part]:
        assert self._parser is not None
        try:
            calls = self._parser.parse(text, self._tools)
        except ValueError:
            self.broken_call = text
            return []
        self.num_calls += len(calls)
        return list(calls)

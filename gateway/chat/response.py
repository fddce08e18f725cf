"""The response of a chat completion, whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gateway.chat.log_probabilities import content_of
from gateway.generation import Increment, Statistics, TextToken
from gateway.reply.parts import Kind, Part, Text
from gateway.reply.reader import ReplyReader
from gateway.reply.tool_parsers import ToolCall
from gateway.usage import timings_of


class Choice:
    """One of the choices of a response, as it comes."""

    def __init__(self, index: int, reader: ReplyReader, *, has_logprobs: bool, has_sources: bool) -> None:
        self._index = index
        self._reader = reader
        self._has_logprobs = has_logprobs
        self._has_sources = has_sources
        self._texts: dict[Kind, list[str]] = {Kind.CONTENT: [], Kind.REASONING: []}
        self._calls: list[ToolCall] = []
        self._tokens: list[TextToken] = []
        self._began = False
        self.finish_reason = ""
        self.statistics: Statistics | None = None

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning."""
        return self._reader.num_reasoning_tokens

    def take(self, increment: Increment) -> list[Part]:
        """Take in what a round brought, and return the parts that are new."""
        finish_reason = increment.finish_reason
        parts = self._reader.push(increment.tokens, is_last=bool(finish_reason))
        if finish_reason:
            parts += self._reader.finish(is_cut=finish_reason == "length")
            self.statistics = increment.statistics
            self.finish_reason = self._reader.finish_reason(finish_reason)
        return parts

    def collect(self, increment: Increment) -> None:
        """Take in what a round brought, for `whole`."""
        for part in self.take(increment):
            if isinstance(part, Text):
                self._texts[part.kind].append(part.text)
            else:
                self._calls.append(part)
        if self._has_logprobs or self._has_sources:
            self._tokens += increment.tokens

    def whole(self) -> dict[str, Any]:
        """Return the choice of a whole response, after its last round."""
        content, reasoning = ("".join(self._texts[kind]) for kind in (Kind.CONTENT, Kind.REASONING))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [_whole_call(call) for call in self._calls]
        return {
            "index": self._index,
            "message": message,
            **self._details(self._tokens),
            "finish_reason": self.finish_reason,
            **self._broken(),
        }

    def chunks(self, increment: Increment) -> list[dict[str, Any]]:
        """Return the choices of the chunks for what a round brought, with statistics in the last one."""
        deltas: list[dict[str, Any]] = [] if self._began else [{"role": "assistant", "content": ""}]
        self._began = True
        for part in self.take(increment):
            if isinstance(part, Text):
                deltas.append({part.kind.value: part.text})
            else:
                deltas += _call_deltas(part, len(self._calls))
                self._calls.append(part)
        if (self._has_logprobs or self._has_sources) and increment.tokens and not deltas:
            deltas.append({"content": ""})  # the tokens are there, and their text is held back
        details = [self._details(())] * len(deltas)
        if deltas and increment.tokens:
            details[-1] = self._details(increment.tokens)
            if self._has_sources:
                details[-1]["round"] = asdict(increment.counts)
        chunks = [
            {"index": self._index, "delta": delta, **more, "finish_reason": None}
            for delta, more in zip(deltas, details, strict=True)
        ]
        if self.finish_reason:
            last = {"index": self._index, "delta": {}, **self._details(()), "finish_reason": self.finish_reason}
            chunks.append({**last, **self._broken()})
        return chunks

    def timings(self) -> dict[str, Any]:
        """Return the `timings`, after the last round."""
        assert self.statistics is not None
        return timings_of([self.statistics])

    def _details(self, tokens: Sequence[TextToken]) -> dict[str, Any]:
        details: dict[str, Any] = {"logprobs": content_of(tokens) if self._has_logprobs and tokens else None}
        if self._has_sources and tokens:
            details["tokens"] = [token.as_json for token in tokens]
        return details

    def _broken(self) -> dict[str, Any]:
        """Return a call that is not whole, or none in spite of its marker, for those who want to see it."""
        return {"broken_tool_call": self._reader.broken_call} if self._reader.broken_call else {}


def _whole_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_deltas(call: ToolCall, index: int) -> list[dict[str, Any]]:
    begun = {**_whole_call(call), "function": {"name": call.name, "arguments": ""}}
    return [
        {"tool_calls": [{"index": index, **begun}]},
        {"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]},
    ]

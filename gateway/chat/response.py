"""The response of a chat completion, whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.chat.log_probabilities import content_of
from gateway.reply.parts import Kind, Part, Text
from gateway.reply.reader import ReplyReader
from gateway.reply.tool_parsers import ToolCall
from gateway.tokens import finish_reason_of, round_of, sources_of
from specd.client import CompletionToken, Delta


class Choice:
    """One of the choices of a response, as it comes."""

    def __init__(self, index: int, reader: ReplyReader, *, has_logprobs: bool, has_sources: bool) -> None:
        self._index = index
        self._reader = reader
        self._has_logprobs = has_logprobs
        self._has_sources = has_sources
        self._texts: dict[Kind, list[str]] = {Kind.CONTENT: [], Kind.REASONING: []}
        self._calls: list[ToolCall] = []
        self._tokens: list[CompletionToken] = []
        self._began = False
        self.finish_reason = ""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning."""
        return self._reader.num_reasoning_tokens

    def take(self, delta: Delta) -> list[Part]:
        """Add a delta, and return the parts that are new."""
        finish_reason = finish_reason_of(delta)
        parts = self._reader.push(delta.tokens, is_last=bool(finish_reason))
        if delta.finished is not None:
            parts += self._reader.finish(is_cut=finish_reason == "length")
            self.finish_reason = self._reader.finish_reason(finish_reason)
        return parts

    def collect(self, delta: Delta) -> None:
        """Add a delta, for `whole`."""
        for part in self.take(delta):
            if isinstance(part, Text):
                self._texts[part.kind].append(part.text)
            else:
                self._calls.append(part)
        if self._has_logprobs or self._has_sources:
            self._tokens += delta.tokens

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

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the choices of the chunks for a delta."""
        deltas: list[dict[str, Any]] = [] if self._began else [{"role": "assistant", "content": ""}]
        self._began = True
        for part in self.take(delta):
            if isinstance(part, Text):
                deltas.append({part.kind.value: part.text})
            else:
                deltas += _call_deltas(part, len(self._calls))
                self._calls.append(part)
        if (self._has_logprobs or self._has_sources) and delta.tokens and not deltas:
            deltas.append({"content": ""})  # the tokens are there, and their text is held back
        details = [self._details(())] * len(deltas)
        if deltas and delta.tokens:
            details[-1] = self._details(delta.tokens)
            if self._has_sources:
                details[-1]["round"] = round_of(delta)
        chunks = [
            {"index": self._index, "delta": each, **more, "finish_reason": None}
            for each, more in zip(deltas, details, strict=True)
        ]
        if self.finish_reason:
            last = {"index": self._index, "delta": {}, **self._details(()), "finish_reason": self.finish_reason}
            chunks.append({**last, **self._broken()})
        return chunks

    def _details(self, tokens: Sequence[CompletionToken]) -> dict[str, Any]:
        details: dict[str, Any] = {"logprobs": content_of(tokens) if self._has_logprobs and tokens else None}
        if self._has_sources and tokens:
            details["tokens"] = sources_of(tokens)
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

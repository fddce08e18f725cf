"""The response of /v1/messages, whole or in events."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from gateway.choices import Indexed
from gateway.completion import head_of
from gateway.http.event_stream import named
from gateway.messages.events import ContentBlocks, Event
from gateway.messages.request import MessageFields
from gateway.reply.reader import ReplyReader
from gateway.served_model import KnownModel
from gateway.tokens import finish_reason_of
from gateway.usage import timings_of
from specd.client import Delta, GenerationStatistics
from specd.client.events import Finished
from specd.vocabulary import FinishReason


class MessageResponse:
    """A message under way."""

    def __init__(self, served: KnownModel, fields: MessageFields, seed: int) -> None:
        self._served = served
        self._fields = fields
        self._blocks = ContentBlocks()
        self._reader: ReplyReader | None = None
        self._max_tokens = fields.max_tokens
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._usage = _usage_of(GenerationStatistics(), 0)
        self._details: dict[str, Any] = {}
        self._head = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            **head_of(served.model, seed),
        }

    async def whole(self, deltas: AsyncGenerator[Indexed]) -> dict[str, Any]:
        """Return the whole message. Raises ApiError."""
        async with aclosing(deltas) as coming:
            async for _, delta in coming:
                self._take(delta)
        return {**self._shown(), **self._details}

    async def events(self, deltas: AsyncGenerator[Indexed]) -> AsyncGenerator[bytes]:
        """Yield the message in events. Raises ApiError."""
        has_begun = False
        async with aclosing(deltas) as coming:
            async for _, delta in coming:
                events = [] if has_begun else [{"type": "message_start", "message": self._shown()}]
                has_begun = True
                events += self._take(delta)
                yield b"".join(map(named, events))
        ending = {"type": "message_delta", "delta": self._stop, "usage": self._usage, **self._details}
        yield named(ending) + named({"type": "message_stop"})

    def _shown(self) -> dict[str, Any]:
        return {**self._head, "content": list(self._blocks.content), **self._stop, "usage": self._usage}

    def _take(self, delta: Delta) -> list[Event]:
        reader = self._reader or self._served.reader(self._fields.chosen_tools, delta.prompt_end)
        self._reader = reader
        self._max_tokens = delta.max_tokens or self._max_tokens
        finish_reason = finish_reason_of(delta)
        events = self._blocks.take(reader.push(delta.tokens, is_last=bool(finish_reason)))
        if (finished := delta.finished) is not None:
            events += self._blocks.take(reader.finish(is_cut=finish_reason == "length"))
            events += self._blocks.close()
            self._stop = self._stop_of(finished, reader.finish_reason(finish_reason))
            self._usage = _usage_of(finished.statistics, reader.num_reasoning_tokens)
            broken = {"broken_tool_call": reader.broken_call} if reader.broken_call else {}
            self._details = {"timings": timings_of([finished.statistics]), "session_id": delta.session_id, **broken}
        return events

    def _stop_of(self, finished: Finished, finish_reason: str) -> dict[str, Any]:
        """Return the reason why a message ends. A broken call has `max_tokens`: the message is not whole."""
        reason, sequence = "end_turn", None
        if finish_reason == "tool_calls":
            reason = "tool_use"
        elif finished.reason is FinishReason.LENGTH and self._max_tokens < self._fields.max_tokens:
            reason = "model_context_window_exceeded"
        elif finish_reason == "length":
            reason = "max_tokens"
        elif finished.reason is FinishReason.STOP_STRING:
            reason, sequence = "stop_sequence", finished.stop_string
        return {"stop_reason": reason, "stop_sequence": sequence}


def _usage_of(statistics: GenerationStatistics, thinking_tokens: int) -> dict[str, Any]:
    """Return the usage of a message: prompt tokens that the prefix cache did not have, and those that it had."""
    cached = statistics.target_reused_tokens
    return {
        "input_tokens": statistics.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,  # nothing is paid for the tokens that the cache keeps
        "cache_read_input_tokens": cached,
        "output_tokens": statistics.generated_tokens,
        "output_tokens_details": {"thinking_tokens": thinking_tokens},
    }

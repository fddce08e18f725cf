"""Answers responses, whole or in events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from gateway.choices import Indexed, merged
from gateway.fields import validated
from gateway.generation import Increment, Requester, Statistics
from gateway.http.answer import Answer
from gateway.http.errors import ApiError
from gateway.http.event_stream import named
from gateway.http.long_bodies import beside_loop
from gateway.reasoning_effort import with_effort
from gateway.reply.reader import ReplyReader
from gateway.responses.items import Event, Items
from gateway.responses.request import ResponseFields, shown_fields
from gateway.served_model import KnownModel
from gateway.service import Service
from gateway.usage import timings_of, usage_of


async def respond(service: Service, body: Mapping[str, Any], caller: Requester) -> Answer:
    """Answer a response. Raises ApiError."""
    fields = await beside_loop(validated, ResponseFields, body)
    seed = service.seed_of(fields)
    ignored = await beside_loop(fields.ignored)
    asked = await beside_loop(fields.response_generation, seed, service.defaults)
    served = await service.models.named(fields.model, caller)
    generation, is_read = with_effort(served.asked(asked), fields.reasoning_effort, served.model.chat_template)
    ignored += [] if is_read else ["reasoning.effort"]
    response = await beside_loop(_Response, served, fields, seed)
    headers: dict[str, str] = {}
    increments = merged(service.generate(generation, 1, caller, headers))
    notes: Any = {
        "ignored": ignored,
        "has_unread_calls": bool(fields.offered_tools) and not served.reply_format.reads_calls,
        "more_headers": headers,
    }
    if fields.stream:
        return Answer(events=response.events(increments), **notes)
    return Answer(json=await response.whole(increments), **notes)


class _Response:
    """A response under way."""

    def __init__(self, served: KnownModel, fields: ResponseFields, seed: int) -> None:
        self._served = served
        self._fields = fields
        self._items = Items()
        self._reader: ReplyReader | None = None
        self._statistics: Statistics | None = None
        self._status = "in_progress"
        self._is_cut = False
        self._session_id = ""
        self._number = 0
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": served.model.model_id,
            "system_fingerprint": served.model.system_fingerprint,
            "seed": seed,
            **shown_fields(fields),
        }

    async def whole(self, increments: AsyncGenerator[Indexed]) -> dict[str, Any]:
        async with aclosing(increments) as coming:
            async for _, increment in coming:
                self._take(increment)
        return self._shown()

    async def events(self, increments: AsyncGenerator[Indexed]) -> AsyncGenerator[bytes]:
        has_begun = False
        try:
            async with aclosing(increments) as coming:
                async for _, increment in coming:
                    events = [] if has_begun else self._beginning()
                    has_begun = True
                    events += self._take(increment)
                    yield b"".join(map(self._numbered, events))
        except ApiError as error:
            if not has_begun:
                raise
            failed = {"code": _error_code(error.status), "message": f"{error.code}: {error}"}
            yield self._numbered(
                {"type": "response.failed", "response": {**self._shown(), "status": "failed", "error": failed}}
            )
            return
        yield self._numbered({"type": f"response.{self._status}", "response": self._shown()})

    def _beginning(self) -> list[Event]:
        return [{"type": f"response.{name}", "response": self._shown()} for name in ("created", "in_progress")]

    def _take(self, increment: Increment) -> list[Event]:
        reader = self._reader or self._new_reader(increment.prompt_end)
        self._reader = reader
        finish_reason = increment.finish_reason
        events = self._items.take(reader.push(increment.tokens, is_last=bool(finish_reason)))
        if finish_reason:
            self._is_cut = finish_reason == "length"
            events += self._items.take(reader.finish(is_cut=self._is_cut))
            self._status = "incomplete" if reader.finish_reason(finish_reason) == "length" else "completed"
            events += self._items.close(self._status)
            self._statistics, self._session_id = increment.statistics, increment.session_id
        return events

    def _new_reader(self, prompt_end: str) -> ReplyReader:
        return self._served.reader(
            self._fields.offered_tools,
            prompt_end,
            has_parallel_calls=self._fields.parallel_tool_calls is not False,
        )

    def _shown(self) -> dict[str, Any]:
        # OpenAI knows no reason for a broken call, so the details of one are empty.
        details = {"reason": "max_output_tokens"} if self._is_cut else {}
        response = {
            **self._head,
            "status": self._status,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "error": None,
            "incomplete_details": details if self._status == "incomplete" else None,
            "output": [dict(item) for item in self._items.output],
            "usage": None,
        }
        if self._statistics is not None and self._reader is not None:
            usage = usage_of([self._statistics], reasoning_tokens=self._reader.num_reasoning_tokens)
            response["usage"] = {
                "input_tokens": usage["prompt_tokens"],
                # Nothing is paid for what the cache takes in.
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._reader.num_reasoning_tokens},
                "total_tokens": usage["total_tokens"],
            }
            response |= {"timings": timings_of([self._statistics]), "session_id": self._session_id}
            if self._reader.broken_call:
                response["broken_tool_call"] = self._reader.broken_call
        return response

    def _numbered(self, event: Event) -> bytes:
        numbered = {"type": event["type"], "sequence_number": self._number, **event}
        self._number += 1
        return named(numbered)


def _error_code(status: int) -> str:
    """Return the code of a failed response: OpenAI's clients know a few, so the error's own is in the message."""
    if status >= 500:
        return "server_error"
    return "rate_limit_exceeded" if status == 429 else "invalid_prompt"

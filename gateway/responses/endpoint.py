"""Answers responses, whole or in events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from gateway.choices import Indexed
from gateway.completion import head_of
from gateway.fields import validated
from gateway.http.answer import Answer
from gateway.http.endpoint import Requester
from gateway.http.errors import ApiError
from gateway.http.event_stream import named
from gateway.http.long_bodies import beside_loop
from gateway.reply.reader import ReplyReader
from gateway.responses.items import Event, Items
from gateway.responses.request import ResponseFields, shown_fields
from gateway.served_model import KnownModel
from gateway.service import PlannedReply, Service
from gateway.tokens import finish_reason_of
from gateway.usage import timings_of, usage_of
from specd.client import Delta, GenerationStatistics


async def respond(service: Service, body: Mapping[str, Any], caller: Requester) -> Answer:
    """Answer a response. Raises ApiError."""
    fields = await beside_loop(validated, ResponseFields, body)
    seed = service.seed_of(fields)
    ignored = await beside_loop(fields.ignored)
    asked = await beside_loop(fields.response_generation, seed, service.defaults)

    async def plan(served: KnownModel) -> PlannedReply:
        known = await beside_loop(served.asked, asked, fields.reasoning_effort)
        unread = [] if known.reads_effort else ["reasoning.effort"]
        return PlannedReply(
            await beside_loop(Response, served, fields, seed),
            [known.generation],
            ignored=[*unread, *(f"tools[{i}].strict" for i in known.free_calls)],
            has_unread_calls=served.leaves_calls_unread(asked.tools),
        )

    return await service.answered(fields.model_choice, caller, plan, ignored=ignored, streams=bool(fields.stream))


class Response:
    """A response under way."""

    def __init__(self, served: KnownModel, fields: ResponseFields, seed: int) -> None:
        self._served = served
        self._fields = fields
        self._items = Items()
        self._reader: ReplyReader | None = None
        self._statistics: GenerationStatistics | None = None
        self._status = "in_progress"
        self._is_cut = False
        self._session_id = ""
        self._number = 0
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            **head_of(served.model, seed),
            **shown_fields(fields),
        }

    async def whole(self, deltas: AsyncGenerator[Indexed]) -> dict[str, Any]:
        """Return the whole response. Raises ApiError."""
        async with aclosing(deltas) as coming:
            async for _, delta in coming:
                self._take(delta)
        return self._shown()

    async def events(self, deltas: AsyncGenerator[Indexed]) -> AsyncGenerator[bytes]:
        """Yield the response in events. Raises ApiError before the first."""
        has_begun = False
        try:
            async with aclosing(deltas) as coming:
                async for _, delta in coming:
                    events = [] if has_begun else self._beginning()
                    has_begun = True
                    events += self._take(delta)
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

    def _take(self, delta: Delta) -> list[Event]:
        reader = self._reader or self._served.reader(self._fields.chosen_tools, delta.prompt_end)
        self._reader = reader
        finish_reason = finish_reason_of(delta)
        events = self._items.take(reader.push(delta.tokens, is_last=bool(finish_reason)))
        if delta.finished is not None:
            self._is_cut = finish_reason == "length"
            events += self._items.take(reader.finish(is_cut=self._is_cut))
            self._status = "incomplete" if reader.finish_reason(finish_reason) == "length" else "completed"
            events += self._items.close(self._status)
            self._statistics, self._session_id = delta.finished.statistics, delta.session_id
        return events

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

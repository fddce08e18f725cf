"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from gateway.chat.request import ChatFields
from gateway.chat.response import Choice
from gateway.choices import Indexed, merged
from gateway.fields import validated
from gateway.generation import Requester
from gateway.http.answer import Answer
from gateway.http.event_stream import DONE, data
from gateway.http.long_bodies import beside_loop
from gateway.reasoning_effort import with_effort
from gateway.served_model import KnownModel
from gateway.service import Service
from gateway.usage import timings_of, usage_of


async def complete_chat(service: Service, body: Mapping[str, Any], caller: Requester) -> Answer:
    """Answer a chat completion. Raises ApiError."""
    fields = await beside_loop(validated, ChatFields, body)
    count = service.num_choices(fields)
    seed = service.seed_of(fields)
    ignored = await beside_loop(fields.ignored)
    asked = await beside_loop(fields.chat_generation, seed, service.defaults)
    served = await service.models.named(fields.model, caller)
    generation, is_read = with_effort(served.asked(asked), fields.reasoning_effort, served.model.chat_template)
    ignored += [] if is_read else ["reasoning_effort"]
    completion = _Completion(served, fields, seed, count)
    headers: dict[str, str] = {}
    increments = merged(service.generate(generation, count, caller, headers))
    notes: Any = {
        "ignored": ignored,
        "has_unread_calls": bool(fields.offered_tools) and not served.reply_format.reads_calls,
        "more_headers": headers,
    }
    if fields.stream:
        return Answer(events=completion.events(increments), **notes)
    return Answer(json=await completion.whole(increments), **notes)


class _Completion:
    """A chat completion under way."""

    def __init__(self, served: KnownModel, fields: ChatFields, seed: int, count: int) -> None:
        self._served = served
        self._fields = fields
        self._count = count
        self._choices: dict[int, Choice] = {}
        self._session_id = ""
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": served.model.model_id,
            "system_fingerprint": served.model.system_fingerprint,
            "seed": seed,
        }

    async def whole(self, increments: AsyncGenerator[Indexed]) -> dict[str, Any]:
        async with aclosing(increments) as coming:
            async for index, increment in coming:
                self._choice(index, increment.prompt_end).collect(increment)
                self._session_id = increment.session_id
        choices = [self._choices[index] for index in range(self._count)]
        statistics = [choice.statistics for choice in choices if choice.statistics is not None]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice.whole() for choice in choices],
            "usage": self._usage(),
            "timings": timings_of(statistics),
            **self._session(),
        }

    async def events(self, increments: AsyncGenerator[Indexed]) -> AsyncGenerator[bytes]:
        head = {**self._head, "object": "chat.completion.chunk"}
        options = self._fields.stream_options
        has_usage = options is not None and bool(options.include_usage)
        usage: dict[str, Any] = {"usage": None} if has_usage else {}
        async with aclosing(increments) as coming:
            async for index, increment in coming:
                choice = self._choice(index, increment.prompt_end)
                self._session_id = increment.session_id
                events = [{**head, "choices": [chunk], **usage} for chunk in choice.chunks(increment)]
                if choice.finish_reason:
                    events[-1] |= {"timings": choice.timings(), **self._session()}
                if events:
                    yield b"".join(map(data, events))
        if has_usage:
            yield data({**head, "choices": [], "usage": self._usage()})
        yield DONE

    def _choice(self, index: int, prompt_end: str) -> Choice:
        if index not in self._choices:
            self._choices[index] = Choice(
                index,
                self._served.reader(
                    self._fields.offered_tools,
                    prompt_end,
                    has_parallel_calls=self._fields.parallel_tool_calls is not False,
                ),
                has_logprobs=bool(self._fields.logprobs),
                has_sources=bool(self._fields.token_sources),
            )
        return self._choices[index]

    def _usage(self) -> dict[str, Any]:
        choices = [self._choices[index] for index in range(self._count)]
        return usage_of(
            [choice.statistics for choice in choices if choice.statistics is not None],
            has_prediction=self._fields.prediction is not None,
            reasoning_tokens=sum(choice.reasoning_tokens for choice in choices),
        )

    def _session(self) -> dict[str, str]:
        """Return the session that another request can continue; of several choices none, as their ids would be."""
        return {"session_id": self._session_id} if self._count == 1 else {}

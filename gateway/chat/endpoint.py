"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.chat.request import ChatFields
from gateway.chat.response import Choice
from gateway.completion import CompletionComposer
from gateway.fields import validated
from gateway.http.answer import Answer
from gateway.http.endpoint import Requester
from gateway.http.long_bodies import beside_loop
from gateway.served_model import KnownModel
from gateway.service import PlannedReply, Service
from gateway.usage import usage_of
from specd.client import Delta


async def complete_chat(service: Service, body: Mapping[str, Any], caller: Requester) -> Answer:
    """Answer a chat completion. Raises ApiError."""
    fields = await beside_loop(validated, ChatFields, body)
    count = service.num_choices(fields)
    seed = service.seed_of(fields)
    ignored = await beside_loop(fields.ignored)
    asked = await beside_loop(fields.chat_generation, seed, service.defaults)

    async def plan(served: KnownModel) -> PlannedReply:
        known = await beside_loop(served.asked, asked, fields.reasoning_effort)
        unread = [] if known.reads_effort else ["reasoning_effort"]
        return PlannedReply(
            ChatCompletion(served, fields, seed, count),
            [known.generation],
            count,
            ignored=[*unread, *(f"tools[{i}].function.strict" for i in known.free_calls)],
            has_unread_calls=served.leaves_calls_unread(asked.tools),
        )

    return await service.answered(fields.model_choice, caller, plan, ignored=ignored, streams=bool(fields.stream))


class ChatCompletion(CompletionComposer):
    """A chat completion under way."""

    _kind = "chat.completion"
    _kind_of_chunks = "chat.completion.chunk"

    def __init__(self, served: KnownModel, fields: ChatFields, seed: int, count: int) -> None:
        super().__init__(served.model, fields, seed, prefix="chatcmpl", num_choices=count)
        self._served = served
        self._fields = fields
        self._choices: dict[int, Choice] = {}

    def _take(self, index: int, delta: Delta) -> None:
        self._choice_of(index, delta).collect(delta)

    def _choice(self, index: int) -> dict[str, Any]:
        return self._choices[index].whole()

    def _chunks(self, index: int, delta: Delta) -> Sequence[dict[str, Any]]:
        return self._choice_of(index, delta).chunks(delta)

    def _choice_of(self, index: int, delta: Delta) -> Choice:
        if index not in self._choices:
            self._choices[index] = Choice(
                index,
                self._served.reader(self._fields.chosen_tools, delta.prompt_end),
                has_logprobs=bool(self._fields.logprobs),
                has_sources=bool(self._fields.token_sources),
            )
        return self._choices[index]

    def _usage(self) -> dict[str, Any]:
        return usage_of(
            self._in_order(),
            has_prediction=self._fields.prediction is not None,
            reasoning_tokens=sum(choice.reasoning_tokens for choice in self._choices.values()),
        )

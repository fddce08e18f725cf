"""Answers messages, whole or in events, and counts their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.fields import validated
from gateway.generation import RequestedGeneration
from gateway.http.answer import Answer
from gateway.http.endpoint import Requester
from gateway.http.long_bodies import beside_loop
from gateway.messages.request import CountFields, MessageFields
from gateway.messages.response import MessageResponse
from gateway.served_model import Asked, KnownModel
from gateway.service import PlannedReply, Service
from specd.text.chat import Chat


async def answer_message(service: Service, body: Mapping[str, Any], caller: Requester) -> Answer:
    """Answer a message. Raises ApiError."""
    fields = await beside_loop(validated, MessageFields, body)
    seed = service.seed_of(fields)
    ignored = await beside_loop(fields.ignored)
    asked = await beside_loop(fields.message_generation, seed, service.defaults, fields.max_tokens)

    async def plan(served: KnownModel) -> PlannedReply:
        known, unread = await _known(served, fields, asked)
        return PlannedReply(
            MessageResponse(served, fields, seed),
            [known.generation],
            ignored=unread,
            has_unread_calls=served.leaves_calls_unread(fields.chosen_tools),
        )

    return await service.answered(fields.model_choice, caller, plan, ignored=ignored, streams=bool(fields.stream))


async def count_tokens(service: Service, body: Mapping[str, Any], caller: Requester) -> Answer:
    """Count the tokens of a message's prompt. Raises ApiError."""
    fields = await beside_loop(validated, CountFields, body)
    ignored = await beside_loop(fields.ignored)
    asked = await beside_loop(fields.message_generation, 0, service.defaults)
    served = await service.models.named(fields.model_choice, caller)
    known, unread = await _known(served, fields, asked)
    assert isinstance(known.generation.prompt, Chat)
    count = await service.count(known.generation.prompt, fields.model_choice, caller)
    return Answer(json={"input_tokens": count.prompt_tokens}, ignored=[*ignored, *unread])


async def _known(served: KnownModel, fields: CountFields, asked: RequestedGeneration) -> tuple[Asked, list[str]]:
    """Return the generation as a model can give it, and the names of the fields that this model ignores."""
    known = await beside_loop(served.asked, asked, fields.effort, thinks=fields.thinks)
    unread = [] if known.reads_effort else ["output_config.effort"]
    unread += [] if known.reads_thinking else ["thinking"]
    return known, [*unread, *(f"tools[{i}].strict" for i in known.free_calls)]

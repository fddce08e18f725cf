"""Answers messages, whole or in events, and counts their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.fields import validated
from gateway.http.answer import Answer
from gateway.http.endpoint import Requester
from gateway.http.long_bodies import beside_loop
from gateway.messages.request import CountFields, MessageFields
from gateway.messages.response import MessageResponse
from gateway.served_model import Asked, KnownModel
from gateway.service import Service
from specd.text.chat import Chat


async def answer_message(service: Service, body: Mapping[str, Any], caller: Requester) -> Answer:
    """Answer a message. Raises ApiError."""
    fields = await beside_loop(validated, MessageFields, body)
    seed = service.seed_of(fields)
    served, known, ignored = await _asked(service, fields, seed, fields.max_tokens, caller)
    answer = Answer(ignored=ignored, has_unread_calls=served.leaves_calls_unread(fields.chosen_tools))
    message = MessageResponse(served, fields, seed)
    return await service.answered(answer, message, [known.generation], 1, caller, streams=bool(fields.stream))


async def count_tokens(service: Service, body: Mapping[str, Any], caller: Requester) -> Answer:
    """Count the tokens of a message's prompt. Raises ApiError."""
    fields = await beside_loop(validated, CountFields, body)
    _, known, ignored = await _asked(service, fields, 0, 1, caller)
    generation = known.generation
    assert isinstance(generation.prompt, Chat)
    count = await service.count(generation.prompt, caller, session_id=generation.session_id)
    return Answer(json={"input_tokens": count.prompt_tokens}, ignored=ignored)


async def _asked(
    service: Service, fields: CountFields, seed: int, max_tokens: int, caller: Requester
) -> tuple[KnownModel, Asked, list[str]]:
    """Return the model, the generation that a request asks of it, and the names of the ignored fields."""
    ignored = await beside_loop(fields.ignored)
    asked = await beside_loop(fields.message_generation, seed, service.defaults, max_tokens)
    served = await service.models.named(fields.model, caller)
    known = await beside_loop(served.asked, asked, fields.effort, thinks=fields.thinks)
    unread = [] if known.reads_effort else ["output_config.effort"]
    unread += [] if known.reads_thinking else ["thinking"]
    return served, known, [*ignored, *unread, *(f"tools[{i}].strict" for i in known.free_calls)]

"""Answers completions, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from gateway.choices import Indexed, merged
from gateway.completions.log_probabilities import lists_of
from gateway.completions.request import CompletionFields
from gateway.fields import validated
from gateway.generation import Increment, Requester, Statistics, TextToken
from gateway.http.answer import Answer
from gateway.http.event_stream import DONE, data
from gateway.http.long_bodies import beside_loop
from gateway.served_model import KnownModel
from gateway.service import Service
from gateway.usage import timings_of, usage_of


async def complete(service: Service, body: Mapping[str, Any], caller: Requester) -> Answer:
    """Answer a completion. Raises ApiError."""
    fields = await beside_loop(validated, CompletionFields, body)
    count = service.num_choices(fields)
    seed = service.seed_of(fields)
    ignored = await beside_loop(fields.ignored)
    generations = fields.generations(seed, service.defaults)
    served = await service.models.named(fields.model, caller)
    headers: dict[str, str] = {}
    streams = [stream for generation in generations for stream in service.generate(generation, count, caller, headers)]
    completion = _Completion(served, fields, seed, count)
    if fields.stream:
        return Answer(events=completion.events(merged(streams)), ignored=ignored, more_headers=headers)
    return Answer(json=await completion.whole(merged(streams)), ignored=ignored, more_headers=headers)


class _Completion:
    """A completion under way: a choice for each prompt and each of its noises, those of one prompt together."""

    def __init__(self, served: KnownModel, fields: CompletionFields, seed: int, count: int) -> None:
        self._fields = fields
        self._prompts = fields.prompts
        self._count = count
        self._lengths = [0] * (len(self._prompts) * count)  # of the texts so far, in characters
        self._statistics: dict[int, Statistics] = {}
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.model.model_id,
            "system_fingerprint": served.model.system_fingerprint,
            "seed": seed,
        }

    async def whole(self, increments: AsyncGenerator[Indexed]) -> dict[str, Any]:
        tokens: list[list[TextToken]] = [[] for _ in self._lengths]
        lasts: list[Increment] = [Increment("", ())] * len(self._lengths)
        async with aclosing(increments) as coming:
            async for index, increment in coming:
                tokens[index] += (*increment.prompt_tokens, *increment.tokens)
                lasts[index] = increment
                self._note(index, increment)
        choices = [self._choice(index, tokens[index], last.finish_reason) for index, last in enumerate(lasts)]
        session = {"session_id": lasts[0].session_id} if len(lasts) == 1 else {}
        return {**self._head, "choices": choices, "usage": self._usage(), "timings": self._timings(), **session}

    async def events(self, increments: AsyncGenerator[Indexed]) -> AsyncGenerator[bytes]:
        options = self._fields.stream_options
        has_usage = options is not None and bool(options.include_usage)
        usage: dict[str, Any] = {"usage": None} if has_usage else {}
        async with aclosing(increments) as coming:
            async for index, increment in coming:
                self._note(index, increment)
                tokens = (*increment.prompt_tokens, *increment.tokens)
                choice = self._choice(index, tokens, increment.finish_reason or None)
                if self._fields.token_sources:
                    choice["round"] = asdict(increment.counts)
                chunk = {**self._head, "choices": [choice], **usage}
                if increment.statistics is not None:
                    chunk["timings"] = timings_of([increment.statistics])
                    if len(self._lengths) == 1:
                        chunk["session_id"] = increment.session_id
                yield data(chunk)
        if has_usage:
            yield data({**self._head, "choices": [], "usage": self._usage()})
        yield DONE

    def _note(self, index: int, increment: Increment) -> None:
        if increment.statistics is not None:
            self._statistics[index] = increment.statistics

    def _choice(self, index: int, tokens: Sequence[TextToken], finish_reason: str | None) -> dict[str, Any]:
        text = "".join(token.text for token in tokens)
        prompt = self._prompts[index // self._count]
        if self._lengths[index] == 0 and self._fields.echoes_as_sent(prompt):
            text = f"{prompt}{text}"
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
        if self._fields.logprobs is not None:
            choice["logprobs"] = lists_of(tokens, self._lengths[index])
        if self._fields.token_sources:
            choice["tokens"] = [token.as_json for token in tokens]
        self._lengths[index] += len(text)
        return choice

    def _usage(self) -> dict[str, Any]:
        return usage_of(self._in_order(), prompts=len(self._prompts))

    def _timings(self) -> dict[str, Any]:
        return timings_of(self._in_order())

    def _in_order(self) -> list[Statistics]:
        return [self._statistics[index] for index in sorted(self._statistics)]

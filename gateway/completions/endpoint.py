"""Answers completions, whole or in chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.completion import CompletionComposer
from gateway.completions.log_probabilities import lists_of
from gateway.completions.request import CompletionFields
from gateway.fields import validated
from gateway.http.answer import Answer
from gateway.http.endpoint import Requester
from gateway.http.long_bodies import beside_loop
from gateway.served_model import KnownModel
from gateway.service import PlannedReply, Service
from gateway.tokens import finish_reason_of, round_of, sources_of
from specd.client import CompletionToken, Delta


async def complete(service: Service, body: Mapping[str, Any], caller: Requester) -> Answer:
    """Answer a completion. Raises ApiError."""
    fields = await beside_loop(validated, CompletionFields, body)
    count = service.num_choices(fields)
    seed = service.seed_of(fields)
    ignored = await beside_loop(fields.ignored)
    generations = await beside_loop(fields.generations, seed, service.defaults)

    async def plan(served: KnownModel) -> PlannedReply:
        return PlannedReply(TextCompletion(served, fields, seed, count), generations, count)

    return await service.answered(fields.model_choice, caller, plan, ignored=ignored, streams=bool(fields.stream))


class TextCompletion(CompletionComposer):
    """A completion under way: a choice for each prompt and each of its noises, those of one prompt together."""

    _kind = _kind_of_chunks = "text_completion"

    def __init__(self, served: KnownModel, fields: CompletionFields, seed: int, count: int) -> None:
        prompts = fields.prompts
        num_choices = len(prompts) * count
        super().__init__(served.model, fields, seed, prefix="cmpl", num_choices=num_choices, num_prompts=len(prompts))
        self._fields = fields
        self._prompts = prompts
        self._count = count
        self._lengths = [0] * num_choices  # of the texts so far, in characters
        self._tokens: list[list[CompletionToken]] = [[] for _ in range(num_choices)]
        self._finish_reasons = [""] * num_choices

    def _take(self, index: int, delta: Delta) -> None:
        self._tokens[index] += (*delta.prompt_tokens, *delta.tokens)
        self._finish_reasons[index] = finish_reason_of(delta)

    def _choice(self, index: int) -> dict[str, Any]:
        return self._shown(index, self._tokens[index], self._finish_reasons[index])

    def _chunks(self, index: int, delta: Delta) -> Sequence[dict[str, Any]]:
        choice = self._shown(index, (*delta.prompt_tokens, *delta.tokens), finish_reason_of(delta) or None)
        return [{**choice, "round": round_of(delta)} if self._fields.token_sources else choice]

    def _shown(self, index: int, tokens: Sequence[CompletionToken], finish_reason: str | None) -> dict[str, Any]:
        text = "".join(token.text for token in tokens)
        prompt = self._prompts[index // self._count]
        if self._lengths[index] == 0 and self._fields.echoes_as_sent(prompt):
            text = f"{prompt}{text}"
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
        if self._fields.logprobs is not None:
            choice["logprobs"] = lists_of(tokens, self._lengths[index])
        if self._fields.token_sources:
            choice["tokens"] = sources_of(tokens)
        self._lengths[index] += len(text)
        return choice

"""The model that is served, as the gateway remembers it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gateway.coordinator import CoordinatorLink
from gateway.generation import Conversation, Generation, ModelCard, Requester
from gateway.http.errors import ApiError
from gateway.reply.format import ReplyFormat, detect_format
from gateway.reply.reader import ReplyReader

_FRESH_SECONDS = 5.0
UNAUTHENTICATED = 401


@dataclass(frozen=True)
class KnownModel:
    """A model, and the form of its replies."""

    model: ModelCard

    def asked(self, generation: Generation) -> Generation:
        """Return a generation of a reply: its stop strings look at the answer, not at the reasoning."""
        prompt = generation.prompt
        if self.reply_format.channels is not None and isinstance(prompt, Conversation):
            prompt = replace(prompt, messages=[self.reply_format.channels.message(each) for each in prompt.messages])
        return replace(generation, prompt=prompt, reasoning=self.reply_format.before_answer)

    def reader(self, tools: Sequence[Mapping[str, Any]], prompt_end: str, *, has_parallel_calls: bool) -> ReplyReader:
        """Return a reader of the reply to a prompt with this end."""
        return ReplyReader(
            self.reply_format,
            tools=tools,
            special_tokens=self.model.special_tokens,
            prompt_end=prompt_end,
            max_calls=None if has_parallel_calls else 1,
        )

    @cached_property
    def reply_format(self) -> ReplyFormat:
        """The form in which it writes reasoning and tool calls."""
        return detect_format(self.model.chat_template, self.model.special_tokens)


class ServedModels:
    """Remembers the model, so that a request does not wait for its description.

    The coordinator serves one model for as long as it lives, and another one after a restart at most. So a description
    is renewed after some seconds beside the request that finds it old, and before the request after an error.
    """

    def __init__(
        self,
        coordinator: CoordinatorLink,
        *,
        asks_for_tokens: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `asks_for_tokens`, there is no model while the coordinator serves who has none."""
        self._coordinator = coordinator
        self._asks_for_tokens = asks_for_tokens
        self._clock = clock
        self._served: KnownModel | None = None
        self._asked_at = 0.0
        self._renewing: asyncio.Task[None] | None = None

    async def get(self, caller: Requester) -> KnownModel:
        """Return the model. Raises ApiError if the coordinator does not describe it."""
        if self._served is None:
            return await self.ask(caller)
        if self._clock() > self._asked_at + _FRESH_SECONDS and self._renewing is None:
            self._renewing = asyncio.ensure_future(self._renew(caller))
        return self._served

    async def ask(self, caller: Requester) -> KnownModel:
        """Ask the coordinator for the model, which also says whether the caller may ask. Raises ApiError."""
        model = await self._coordinator.model(caller)
        if self._asks_for_tokens:
            await self._check_that_strangers_are_refused()
        self._asked_at = self._clock()
        if self._served is None or self._served.model != model:
            self._served = KnownModel(model)
        return self._served

    async def named(self, name: str | None, caller: Requester) -> KnownModel:
        """Return the model if it is the one of this name, or there is none. Raises ApiError."""
        served = await self.get(caller)
        if name and name != served.model.model_id:
            served = await self.ask(caller)  # it may be another one by now
            if name != served.model.model_id:
                raise not_found(name, served.model)
        return served

    def forget(self) -> None:
        """Ask anew at the next request: the coordinator failed, and may come back with another model."""
        self._served = None

    async def _check_that_strangers_are_refused(self) -> None:
        try:
            await self._coordinator.model(Requester())
        except ApiError as error:
            if error.status == UNAUTHENTICATED:
                return
            raise
        everyone = "everyone could use this gateway: start the coordinator with --tokens, or the gateway with --tls-ca"
        raise ApiError(503, "open_to_everyone", everyone)

    async def _renew(self, caller: Requester) -> None:
        try:
            with contextlib.suppress(ApiError):
                await self.ask(caller)
        finally:
            self._renewing = None


def not_found(name: str, model: ModelCard) -> ApiError:
    """Return the error of a model that is not served."""
    return ApiError(
        404,
        "model_not_found",
        f"there is no model {name[:200]!r} here: the one that is served is {model.model_id!r}",
        param="model",
    )

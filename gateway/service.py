"""What the endpoints share: the coordinator, the model that it serves, and the limits of a request."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.choices import Indexed, merged
from gateway.fields import Defaults, SamplingFields
from gateway.generation import RequestedGeneration
from gateway.http.answer import Answer
from gateway.http.endpoint import Requester
from gateway.http.errors import invalid
from gateway.http.long_bodies import beside_loop
from gateway.http.notice import Notice
from gateway.model_choice import ModelChoice
from gateway.served_model import KnownModel
from gateway.served_models import ServedModels
from gateway.wording import to_api_error
from specd.client import AsyncClient, Delta, GenerationOptions, Loading, Retrying, TokenCount
from specd.client.protocol.wire import to_count
from specd.errors import SpecdError
from specd.gateway_settings import GatewaySettings
from specd.text.chat import Chat

_CUT = "x-specd-max-tokens"
_SEED_BITS = 32  # short enough for languages whose numbers are all doubles


class Composer(Protocol):
    """Makes the reply of an endpoint from deltas."""

    async def whole(self, deltas: AsyncGenerator[Indexed]) -> dict[str, Any]:
        """Return the whole reply. Raises ApiError."""

    def events(self, deltas: AsyncGenerator[Indexed]) -> AsyncGenerator[bytes]:
        """Yield the reply in events. Raises ApiError."""


@dataclass(frozen=True)
class PlannedReply:
    """The generations for a request, `count` of each, all with their own noise, and what makes the reply of them.

    `ignored` are fields of the request that this model ignores, and `has_unread_calls` is as in Answer.
    """

    composer: Composer
    generations: Sequence[RequestedGeneration]
    count: int = 1
    ignored: Sequence[str] = ()
    has_unread_calls: bool = False


Plan = Callable[[KnownModel], Awaitable[PlannedReply]]


class Service:
    """The coordinator, with the limits that the gateway adds."""

    def __init__(self, client: AsyncClient, settings: GatewaySettings) -> None:
        self.client = client
        self.settings = settings
        self.defaults = Defaults(settings.default_max_tokens, settings.cut_max_tokens)
        self.models = ServedModels(client, asks_for_tokens=settings.asks_for_tokens)

    def num_choices(self, fields: SamplingFields) -> int:
        """Return how many choices are wanted. Raises ApiError if they are too many."""
        count = fields.n or 1
        if count > self.settings.max_choices:
            raise invalid(f"n is {count}: the most is {self.settings.max_choices} (--max-choices)", "n")
        if count > 1 and fields.session_id:
            raise invalid(f"n is {count}, but a session continues with one answer: leave out n or session_id", "n")
        return count

    @staticmethod
    def seed_of(fields: SamplingFields) -> int:
        """Return the seed of a request, or a new one."""
        return secrets.randbits(_SEED_BITS) if fields.seed is None else fields.seed % 2**64

    async def answered(
        self,
        choice: ModelChoice,
        caller: Requester,
        plan: Plan,
        *,
        ignored: Sequence[str],
        streams: bool,
    ) -> Answer:
        """Return an answer with the reply that `plan` makes for the model. Raises ApiError.

        Before the first delta of a generation whose `max_tokens` was cut, a header says to how many: the fewest of all.
        If the model has to be loaded, a stream begins before that, without the headers that depend on the model.
        """
        notice = Notice()
        served = await self.models.at_once(choice, caller)
        if served is None and streams:
            return Answer(events=self._late_events(choice, caller, plan, notice), ignored=ignored, notice=notice)
        planned = await plan(served or await self.models.loaded(choice, caller, notice))
        headers: dict[str, str] = {}
        deltas = self._all_deltas(planned, caller, headers, notice)
        return Answer(
            json=None if streams else await planned.composer.whole(deltas),
            events=planned.composer.events(deltas) if streams else None,
            ignored=[*ignored, *planned.ignored],
            has_unread_calls=planned.has_unread_calls,
            more_headers=headers,
            notice=notice,
        )

    async def count(
        self,
        prompt: str | Chat,
        choice: ModelChoice,
        caller: Requester,
        *,
        return_token_ids: bool = False,
        add_special_tokens: bool = True,
    ) -> TokenCount:
        """Return the number of tokens of a prompt, behind those of a session, or the tokens too. Raises ApiError."""
        try:
            request = await beside_loop(
                to_count,
                prompt,
                _options_of(choice, caller),
                session_id=choice.session_id,
                return_token_ids=return_token_ids,
                add_special_tokens=add_special_tokens,
            )
            return await self.client.count(request, token=caller.token)
        except SpecdError as error:
            raise to_api_error(error) from error

    async def _late_events(
        self, choice: ModelChoice, caller: Requester, plan: Plan, notice: Notice
    ) -> AsyncGenerator[bytes]:
        """Yield the events of a reply by a model that has to be loaded first. Raises ApiError."""
        planned = await plan(await self.models.loaded(choice, caller, notice))
        async with aclosing(planned.composer.events(self._all_deltas(planned, caller, {}, notice))) as events:
            async for event in events:
                yield event

    def _all_deltas(
        self, planned: PlannedReply, caller: Requester, headers: dict[str, str], notice: Notice
    ) -> AsyncGenerator[Indexed]:
        choices = [each.choice(index) for each in planned.generations for index in range(planned.count)]
        return merged([self._deltas(choice, caller, headers, notice) for choice in choices])

    async def _deltas(
        self, generation: RequestedGeneration, caller: Requester, headers: dict[str, str], notice: Notice
    ) -> AsyncGenerator[Delta]:
        name = generation.options.get("model") or "the model"
        most = generation.options.get("max_tokens") or 0
        try:
            async with await beside_loop(generation.start, self.client, caller) as stream:
                async for event in stream:
                    if isinstance(event, Retrying):
                        self.models.forget()
                    elif isinstance(event, Loading):  # it was unloaded after it was described
                        notice.say(f"loading {name}, {event.words}")
                    elif isinstance(event, Delta):
                        notice.say("")
                        if generation.is_max_tokens_given and 0 < event.max_tokens < most:
                            headers[_CUT] = str(min(event.max_tokens, int(headers.get(_CUT, event.max_tokens))))
                        yield event
        except SpecdError as error:
            failure = to_api_error(error, max_tokens=generation.max_tokens_field, grammar=generation.grammar_field)
            if failure.status >= 500 or error.reason == "MODEL_NOT_FOUND":
                self.models.forget()
            raise failure from error


def _options_of(choice: ModelChoice, caller: Requester) -> GenerationOptions:
    return {"model": choice.name, "refuse_unloaded": choice.refuses_unloaded or caller.refuses_unloaded}

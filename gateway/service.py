"""What the endpoints share: the coordinator, the model that it serves, and the limits of a request."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from gateway.choices import Indexed, merged
from gateway.fields import Defaults, SamplingFields
from gateway.generation import RequestedGeneration
from gateway.http.answer import Answer
from gateway.http.endpoint import Requester
from gateway.http.errors import invalid
from gateway.http.long_bodies import beside_loop
from gateway.served_model import ServedModels
from gateway.wording import to_api_error
from specd.client import AsyncClient, Delta, Retrying, TokenCount
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
        answer: Answer,
        composer: Composer,
        generations: Sequence[RequestedGeneration],
        count: int,
        caller: Requester,
        *,
        streams: bool,
    ) -> Answer:
        """Return an answer with a reply to `count` generations of each, all with their own noise. Raises ApiError.

        Before the first delta of a generation whose `max_tokens` was cut, a header says to how many: the fewest of all.
        """
        headers: dict[str, str] = {}
        choices = [generation.choice(index) for generation in generations for index in range(count)]
        deltas = merged([self._deltas(choice, caller, headers) for choice in choices])
        if streams:
            return replace(answer, events=composer.events(deltas), more_headers=headers)
        return replace(answer, json=await composer.whole(deltas), more_headers=headers)

    async def count(
        self,
        prompt: str | Chat,
        caller: Requester,
        *,
        session_id: str = "",
        return_token_ids: bool = False,
        add_special_tokens: bool = True,
    ) -> TokenCount:
        """Return the number of tokens of a prompt, behind those of a session, or the tokens too. Raises ApiError."""
        try:
            request = await beside_loop(
                to_count,
                prompt,
                {},
                session_id=session_id,
                return_token_ids=return_token_ids,
                add_special_tokens=add_special_tokens,
            )
            return await self.client.count(request, token=caller.token)
        except SpecdError as error:
            raise to_api_error(error) from error

    async def _deltas(
        self, generation: RequestedGeneration, caller: Requester, headers: dict[str, str]
    ) -> AsyncGenerator[Delta]:
        most = generation.options.get("max_tokens") or 0
        try:
            async with await beside_loop(generation.start, self.client, caller) as stream:
                async for event in stream:
                    if isinstance(event, Retrying):
                        self.models.forget()
                    elif isinstance(event, Delta):
                        if generation.is_max_tokens_given and 0 < event.max_tokens < most:
                            headers[_CUT] = str(min(event.max_tokens, int(headers.get(_CUT, event.max_tokens))))
                        yield event
        except SpecdError as error:
            failure = to_api_error(error, max_tokens=generation.max_tokens_field, grammar=generation.grammar_field)
            if failure.status >= 500:
                self.models.forget()
            raise failure from error

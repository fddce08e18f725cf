"""What the endpoints share: the coordinator, the model that it serves, and the limits of a request."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from dataclasses import replace

from gateway.choices import seed_of
from gateway.coordinator import CoordinatorLink
from gateway.fields import Defaults, SamplingFields
from gateway.generation import Generation, Increment, Requester
from gateway.http.errors import ApiError, invalid
from gateway.served_model import ServedModels
from specd.gateway_settings import GatewaySettings

_CUT = "x-specd-max-tokens"
_SEED_BITS = 32  # short enough for languages whose numbers are all doubles


class Service:
    """The coordinator, with the limits that the gateway adds."""

    def __init__(self, coordinator: CoordinatorLink, settings: GatewaySettings) -> None:
        self.coordinator = coordinator
        self.settings = settings
        self.defaults = Defaults(settings.default_max_tokens, settings.cut_max_tokens)
        self.models = ServedModels(coordinator, asks_for_tokens=settings.asks_for_tokens)

    def num_choices(self, fields: SamplingFields) -> int:
        """Return how many choices are wanted. Raises ApiError if they are too many."""
        count = fields.n or 1
        if count > self.settings.max_choices:
            raise invalid(f"n is {count}: the most is {self.settings.max_choices} (--max-choices)", "n")
        if count > 1 and fields.session_id:
            raise invalid(f"n is {count}, but a session goes on in one way: leave out n or session_id", "n")
        return count

    @staticmethod
    def seed_of(fields: SamplingFields) -> int:
        """Return the seed of a request, or a new one."""
        return secrets.randbits(_SEED_BITS) if fields.seed is None else fields.seed % 2**64

    def generate(
        self, generation: Generation, count: int, caller: Requester, headers: dict[str, str]
    ) -> list[AsyncGenerator[Increment]]:
        """Return `count` generations, each with its own noise; a generation begins when it is read.

        Before the first increment of one whose `max_tokens` was cut, `headers` say to how many: the fewest of all.
        """
        return [
            self._watched(replace(generation, seed=seed_of(generation.seed, choice)), caller, headers)
            for choice in range(count)
        ]

    async def _watched(
        self, generation: Generation, caller: Requester, headers: dict[str, str]
    ) -> AsyncGenerator[Increment]:
        increments = self.coordinator.generate(generation, caller)
        try:
            async for increment in increments:
                if generation.is_max_tokens_given and 0 < increment.max_tokens < (generation.max_tokens or 0):
                    headers[_CUT] = str(min(increment.max_tokens, int(headers.get(_CUT, increment.max_tokens))))
                yield increment
        except ApiError as error:
            if error.status >= 500:
                self.models.forget()
            raise
        finally:
            await increments.aclose()

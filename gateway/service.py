"""What the endpoints share: the coordinator, the model that it serves, and the limits of a request."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from dataclasses import replace

from gateway.choices import seed_of
from gateway.coordinator import CoordinatorLink
from gateway.fields import SamplingFields
from gateway.generation import Generation, Increment, Requester
from gateway.http.errors import ApiError, invalid
from gateway.served_model import ServedModels
from specd.gateway_settings import GatewaySettings

_SEED_BITS = 32  # short enough for languages whose numbers are all doubles


class Service:
    """The coordinator, with the limits that the gateway adds."""

    def __init__(self, coordinator: CoordinatorLink, settings: GatewaySettings) -> None:
        self.coordinator = coordinator
        self.settings = settings
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

    def generate(self, generation: Generation, count: int, caller: Requester) -> list[AsyncGenerator[Increment]]:
        """Return so many generations, each with a noise of its own; they begin when they are read."""
        return [
            self._watched(replace(generation, seed=seed_of(generation.seed, choice)), caller) for choice in range(count)
        ]

    async def _watched(self, generation: Generation, caller: Requester) -> AsyncGenerator[Increment]:
        increments = self.coordinator.generate(generation, caller)
        try:
            async for increment in increments:
                yield increment
        except ApiError as error:
            if error.status >= 500:
                self.models.forget()
            raise
        finally:
            await increments.aclose()

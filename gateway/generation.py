"""A generation that a request asks for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.calls.tool_choice import NO_TOOLS, ToolChoice
from gateway.http.endpoint import Requester
from specd.client import AsyncClient, AsyncStream, GenerationOptions
from specd.text.chat import Chat


@dataclass(frozen=True)
class RequestedGeneration:
    """What to generate; `max_tokens_field` is the endpoint's name for `max_tokens`, which the client may have given.

    `grammar_field` names the field that asks for a form of the text. `tools` are those that the reply may call.
    """

    prompt: str | Sequence[int] | Chat
    options: GenerationOptions
    session_id: str = ""
    max_tokens_field: str = "max_tokens"
    grammar_field: str = ""
    is_max_tokens_given: bool = False
    tools: ToolChoice = NO_TOOLS

    def choice(self, index: int) -> RequestedGeneration:
        """Return the generation of one of several choices, with a noise of its own."""
        return replace(self, options={**self.options, "seed": seed_of(self.options["seed"] or 0, index)})

    def start(self, client: AsyncClient, caller: Requester) -> AsyncStream:
        """Return its stream. Raises InvalidRequestError for values that cannot be sent."""
        options: GenerationOptions = {
            **self.options,
            "refuse_unloaded": caller.refuses_unloaded or bool(self.options.get("refuse_unloaded")),
            "token": caller.token,
            "traceparent": caller.traceparent,
        }
        turns = client.session(self.session_id) if self.session_id else client
        if not isinstance(self.prompt, Chat):
            return turns.generate(self.prompt, **options)
        return turns.chat(
            self.prompt.messages,
            tools=self.prompt.tools,
            template_arguments=self.prompt.template_arguments,
            continue_final_message=self.prompt.continue_final_message,
            **options,
        )


def seed_of(seed: int, choice: int) -> int:
    """Return the seed of a choice; the first one has the request's, like that of a request for one choice."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")

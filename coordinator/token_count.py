"""The number of tokens with which a generation would begin, and whether it would fit."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

from coordinator.coordinator import Coordinator
from coordinator.sessions.request import GenerationRequest
from coordinator.sessions.session_model import model_for
from coordinator.sessions.session_store import KeptSession
from specd.errors import InvalidRequestError


@dataclass(frozen=True)
class CountedPrompt:
    """The tokens of a prompt with its session, and of a source, and the room in the context behind them.

    It `fits` if context and caches have room for it and for the tokens to generate.
    """

    token_ids: list[int]
    source_tokens: int
    room: int
    fits: bool


async def count_tokens(
    coordinator: Coordinator, request: GenerationRequest, *, add_special_tokens: bool = True
) -> CountedPrompt:
    """Count the tokens of the prompt of a generation, which does not begin.

    Without `add_special_tokens`, a text is encoded without those that the tokenizer adds in front.
    It holds a place among the requests, like a generation, because templates and tokenizers cost the same. Raises the
    errors of a Generation before its session begins, except for a prompt that does not fit. Only a prompt that is far
    longer than the context raises, because it is not counted to its end.
    """
    request.check_session()
    coordinator.quotas.check(request.client, request.client_limits)
    with coordinator.admission.place(request.client, request.client_limits.max_sessions):
        if not add_special_tokens and isinstance(request.prompt, str):
            request = replace(request, prompt=await coordinator.encode_text(request.prompt))
        if request.session_id:
            await coordinator.keeper.refresh(request.client, request.session_id)
        session = _session(coordinator, request)
        model = model_for(coordinator.model, request.model, session)
        prompt = await coordinator.encode(request, session)
    num_tokens = len(prompt.token_ids)
    try:
        max_tokens = request.check(model, prompt)
        fits = coordinator.admission.capacities.fits_alone(num_tokens + max_tokens, len(prompt.source))
    except InvalidRequestError as error:
        if error.reason != "CONTEXT_EXCEEDED":
            raise
        fits = False
    return CountedPrompt(prompt.token_ids, len(prompt.source), max(model.context_length - num_tokens, 0), fits)


def _session(coordinator: Coordinator, request: GenerationRequest) -> KeptSession:
    """Return the session, without counting a use of it; or a new session that would begin."""
    if request.session_id:
        return replace(coordinator.sessions.get(request.session_id, request.client))
    new = KeptSession("", request.client, created_at=0.0, last_used_at=0.0, idle_since=0.0)
    new.token_ids = array("I", request.resumption.session_token_ids)
    return new

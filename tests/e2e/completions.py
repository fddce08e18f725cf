"""Completions of a prompt by the shared stack, with the checks that hold for every stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specd.v1.generation_pb2 import FINISH_REASON_UNSPECIFIED, Chat, GenerateResponse, SessionStatistics
from tests.e2e.processes import PATIENCE_SECONDS
from tests.raw_client import RawClient

PROMPT = "class Stack:\n    def"
MAX_TOKENS = 32
KS = (0, 4, 8)


@dataclass(frozen=True)
class Completion:
    """The messages of a stream."""

    responses: list[GenerateResponse]

    @property
    def tokens(self) -> list[Any]:
        return [token for response in self.responses for token in response.tokens]

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(response.text for response in self.responses)

    @property
    def last(self) -> GenerateResponse:
        return self.responses[-1]

    @property
    def finish_reasons(self) -> list[int]:
        return [response.finish_reason for response in self.responses if response.finish_reason]

    @property
    def statistics(self) -> SessionStatistics:
        return self.last.statistics


async def complete(client: RawClient, prompt: str | Sequence[int] | Chat = PROMPT, **fields: Any) -> Completion:
    """Generate to the end, and check what holds for every stream."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        completion = Completion([response async for response in client.generate(prompt, **fields)])
    responses, tokens, statistics = completion.responses, completion.tokens, completion.statistics
    assert len({(response.session_id, response.seed) for response in responses}) == 1
    for response in responses:
        is_last = response is responses[-1]
        assert response.text == "".join(token.text for token in response.tokens)
        assert (response.finish_reason != FINISH_REASON_UNSPECIFIED) == response.HasField("statistics") == is_last
        assert (response.WhichOneof("stopped_by") is not None) <= is_last
        assert response.tokens
        assert sum(token.drafted for token in response.tokens) == response.round.accepted
    rounds = [response.round for response in responses]
    assert statistics.generated_tokens == len(tokens)
    assert statistics.generated_tokens == (
        statistics.accepted_tokens + statistics.recovered_tokens + statistics.bonus_tokens
    )
    assert statistics.rounds == len(rounds)
    assert statistics.proposed_tokens == sum(round_.proposed for round_ in rounds)
    assert statistics.accepted_tokens == sum(round_.accepted for round_ in rounds)
    assert statistics.wasted_tokens == statistics.proposed_tokens - statistics.accepted_tokens
    by_position = range(fields.get("num_draft_tokens", 32))
    for counted, counts in (
        ([round_.proposed for round_ in rounds], statistics.proposed_by_position),
        ([round_.accepted for round_ in rounds], statistics.accepted_by_position),
    ):
        expected = [sum(count > position for count in counted) for position in by_position]
        assert [*counts, *[0] * (len(by_position) - len(counts))] == expected
    return completion

"""draft.proto in plain values."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from coordinator.plan import Plan
from coordinator.round import Exchange, Proposal
from coordinator.worker_stream import WorkerStream
from specd.sampling import Sampling
from specd.sampling_messages import distribution_from
from specd.v1 import draft_pb2, draft_pb2_grpc


class GrpcDraftStream:
    """A `DraftStream` over gRPC."""

    def __init__(self, channel: grpc.aio.Channel, session_id: str, sampling: Sampling) -> None:
        """Open the stream of a session on the channel of the draft worker."""
        call = draft_pb2_grpc.DraftServiceStub(channel).Propose(metadata=(("specd-session-id", session_id),))
        self._stream = WorkerStream[draft_pb2.ProposeRequest, draft_pb2.ProposeResponse](call, sampling, worker="draft")

    async def send(self, position: int, token_ids: Sequence[int], plan: Plan, timeout_seconds: float) -> None:
        """Send a request. Raises WorkerError."""
        request = draft_pb2.ProposeRequest(
            round=self._stream.next_round,
            position=position,
            token_ids=token_ids,
            num_draft_tokens=plan.num_draft_tokens,
            min_confidences=plan.min_confidences,
            num_ahead_tokens=plan.num_ahead_tokens,
            min_ahead_confidence=plan.min_ahead_confidence,
        )
        await self._stream.send(request, timeout_seconds)

    async def receive(self, timeout_seconds: float) -> Proposal:
        """Wait for the proposal. Raises WorkerError."""
        return _proposal(*await self._stream.receive(timeout_seconds))

    def take_ahead(self) -> tuple[Proposal, Proposal] | None:
        """Return the proposal and what comes after it, once both are there."""
        responses = self._stream.take_both()
        if responses is None:
            return None
        proposal, ahead = responses
        return _proposal(proposal, Exchange()), _proposal(ahead, Exchange())

    def close(self) -> None:
        """End the stream."""
        self._stream.close()


def _proposal(response: draft_pb2.ProposeResponse, exchange: Exchange) -> Proposal:
    return Proposal(
        list(response.token_ids),
        [distribution_from(message) for message in response.distributions],
        response.cached_len,
        response.reused_len,
        exchange,
        confidences=list(response.confidences),
    )

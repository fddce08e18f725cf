"""target.proto in plain values."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from coordinator.round import Proposal, Verdict
from coordinator.worker_stream import WorkerStream
from specd.sampling import Sampling
from specd.sampling_messages import log_probabilities_from, to_distribution
from specd.v1 import target_pb2, target_pb2_grpc


class GrpcTargetStream:
    """A `TargetStream` over gRPC."""

    def __init__(self, channel: grpc.aio.Channel, session_id: str, sampling: Sampling) -> None:
        """Open the stream of a session on the channel of the target worker."""
        call = target_pb2_grpc.TargetServiceStub(channel).Verify(metadata=(("specd-session-id", session_id),))
        self._stream = WorkerStream[target_pb2.VerifyRequest, target_pb2.VerifyResponse](
            call, sampling, worker="target"
        )

    async def verify(
        self, position: int, token_ids: Sequence[int], proposal: Proposal, timeout_seconds: float
    ) -> Verdict:
        """Run one round. Raises WorkerError."""
        request = target_pb2.VerifyRequest(
            round=self._stream.next_round,
            position=position,
            token_ids=token_ids,
            proposal=proposal.token_ids,
            distributions=map(to_distribution, proposal.distributions),
        )
        await self._stream.send(request, timeout_seconds)
        response, exchange = await self._stream.receive(timeout_seconds)
        return Verdict(
            response.num_accepted,
            response.next_token_id,
            response.cached_len,
            response.reused_len,
            [log_probabilities_from(message) for message in response.log_probabilities],
            exchange,
        )

    def close(self) -> None:
        """End the stream."""
        self._stream.close()

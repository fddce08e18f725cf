"""target.proto in plain values."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from coordinator.round import Exchange
from coordinator.worker_stream import WorkerStream
from specd.v1 import target_pb2, target_pb2_grpc


class GrpcTargetStream:
    """A `TargetStream` over gRPC."""

    def __init__(self, channel: grpc.aio.Channel, session_id: str) -> None:
        """Open the stream of a session on the channel of the target worker."""
        call = target_pb2_grpc.TargetServiceStub(channel).Verify(metadata=(("specd-session-id", session_id),))
        self._stream = WorkerStream[target_pb2.VerifyRequest, target_pb2.VerifyResponse](call, worker="target")

    async def verify(
        self, position: int, token_ids: Sequence[int], proposal: Sequence[int], timeout_seconds: float
    ) -> tuple[int, int, int, Exchange]:
        """Run one round: num_accepted, next_token_id and cached_len. Raises WorkerError."""
        request = target_pb2.VerifyRequest(
            round=self._stream.next_round, position=position, token_ids=token_ids, proposal=proposal
        )
        await self._stream.send(request, timeout_seconds)
        response, exchange = await self._stream.receive(timeout_seconds)
        return response.num_accepted, response.next_token_id, response.cached_len, exchange

    def close(self) -> None:
        """End the stream."""
        self._stream.close()

"""TargetService: the target worker's gRPC edge."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from specd.deferred import Deferred
from specd.v1 import model_pb2, target_pb2, target_pb2_grpc
from specd.worker.engine import Done, Steps
from specd.worker.requests import check_request
from specd.worker.session_cache import SessionCache
from specd.worker.session_stream import SessionStreams
from specd.worker.worker import Worker
from target_worker.verification import Verdict, verify


class TargetService(target_pb2_grpc.TargetServiceServicer):
    """Verifies proposals, one stream a session."""

    def __init__(self, worker: Deferred[Worker]) -> None:
        self._streams = SessionStreams(worker, begin=_begin, answer=_answer)

    async def Verify(
        self,
        request_iterator: AsyncIterator[target_pb2.VerifyRequest],
        context: grpc.aio.ServicerContext[target_pb2.VerifyRequest, target_pb2.VerifyResponse],
    ) -> None:
        """Serve one session."""
        await self._streams.serve(context)


def _begin(worker: Worker, cache: SessionCache, request: target_pb2.VerifyRequest) -> Steps[Verdict]:
    token_ids, proposal = list(request.token_ids), list(request.proposal)
    check_request(worker.model.info, request.position, token_ids, proposal=proposal)
    return verify(cache, request.position, token_ids, proposal, prefill_chunk_tokens=worker.prefill_chunk_tokens)


def _answer(request: target_pb2.VerifyRequest, done: Done[Verdict]) -> target_pb2.VerifyResponse:
    return target_pb2.VerifyResponse(
        round=request.round,
        num_accepted=done.result.num_accepted,
        next_token_id=done.result.next_token_id,
        cached_len=done.result.cached_len,
        time=model_pb2.WorkerTime(queue_seconds=done.queue_seconds, compute_seconds=done.compute_seconds),
    )

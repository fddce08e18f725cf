"""DraftService: the draft worker's gRPC edge."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from draft_worker.proposal import Proposal, propose
from specd.deferred import Deferred
from specd.sampling import check_token_ids
from specd.sampling_messages import to_distribution
from specd.v1 import draft_pb2, draft_pb2_grpc, model_pb2
from specd.worker.engine import Done, Steps
from specd.worker.requests import check_request
from specd.worker.session import WorkerSession
from specd.worker.session_stream import SessionStreams
from specd.worker.worker import Worker


class DraftService(draft_pb2_grpc.DraftServiceServicer):
    """Proposes tokens, one stream a session."""

    def __init__(self, worker: Deferred[Worker]) -> None:
        self._streams = SessionStreams(worker, begin=_begin, answer=_answer)

    async def Propose(
        self,
        request_iterator: AsyncIterator[draft_pb2.ProposeRequest],
        context: grpc.aio.ServicerContext[draft_pb2.ProposeRequest, draft_pb2.ProposeResponse],
    ) -> None:
        """Serve one session."""
        await self._streams.serve(context)


def _begin(worker: Worker, session: WorkerSession, request: draft_pb2.ProposeRequest) -> Steps[Proposal]:
    token_ids = list(request.token_ids)
    model = worker.model.info
    check_request(model, request.position, token_ids, num_draft_tokens=request.num_draft_tokens)
    if target_size := session.sampler.sampling.vocabulary_size:
        # The penalties look tokens up in the rows that are left of the logits.
        check_token_ids("token_ids", token_ids, vocabulary_size=target_size, model_name="the target")
    return propose(
        session.cache,
        session.sampler,
        request.position,
        token_ids,
        request.num_draft_tokens,
        chunk=worker.chunk,
    )


def _answer(
    session: WorkerSession, request: draft_pb2.ProposeRequest, done: Done[Proposal]
) -> draft_pb2.ProposeResponse:
    return draft_pb2.ProposeResponse(
        round=request.round,
        token_ids=done.result.token_ids,
        cached_len=done.result.cached_len,
        time=model_pb2.WorkerTime(queue_seconds=done.queue_seconds, compute_seconds=done.compute_seconds),
        reused_len=session.cache.reused_len,
        distributions=map(to_distribution, done.result.distributions),
    )

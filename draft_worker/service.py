"""DraftService: the draft worker's gRPC edge."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from specd.rpc.deferred import Deferred
from specd.rpc.messages import to_distribution
from specd.rpc.multiplex_service import MultiplexService
from specd.sampling import check_token_ids
from specd.v1 import draft_pb2, draft_pb2_grpc, multiplex_pb2_grpc
from specd.worker.engine.jobs import Done, Steps
from specd.worker.session.proposal import DraftedTokens, propose
from specd.worker.session.stream import SessionStreams, Worker, WorkerSession, worker_time
from specd.worker.session.validation import check_confidences, check_request


class DraftService(draft_pb2_grpc.DraftServiceServicer):
    """Proposes tokens, one stream a session."""

    def __init__(self, worker: Deferred[Worker]) -> None:
        self.streams = SessionStreams(worker, begin=_begin, answer=_answer)

    async def Propose(
        self,
        request_iterator: AsyncIterator[draft_pb2.ProposeRequest],
        context: grpc.aio.ServicerContext[draft_pb2.ProposeRequest, draft_pb2.ProposeResponse],
    ) -> None:
        """Serve one session."""
        await self.streams.serve(context)


def add_services(worker: Deferred[Worker], server: grpc.aio.Server) -> None:
    """Serve sessions, each in a call of its own or several in one."""
    service = DraftService(worker)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(service, server)
    multiplexing = MultiplexService(
        lambda: worker.get().incarnation, service.streams.serve, draft_pb2.ProposeRequest.FromString
    )
    multiplex_pb2_grpc.add_MultiplexServiceServicer_to_server(multiplexing, server)


def _begin(worker: Worker, session: WorkerSession, request: draft_pb2.ProposeRequest) -> Steps[DraftedTokens]:
    token_ids = list(request.token_ids)
    model = worker.model.info
    check_request(model, request.position, token_ids, num_draft_tokens=request.num_draft_tokens)
    check_confidences(request.min_confidences)
    if target_size := session.sampler.sampling.vocabulary_size:
        # Penalties index the logits by token, so the ids must lie inside the cut vocabulary.
        check_token_ids("token_ids", token_ids, vocabulary_size=target_size, model_name="the target")
    return propose(
        session.cache,
        session.sampler,
        request.position,
        token_ids,
        request.num_draft_tokens,
        chunk=worker.chunk,
        min_confidences=list(request.min_confidences),
    )


def _answer(
    session: WorkerSession, request: draft_pb2.ProposeRequest, done: Done[DraftedTokens]
) -> draft_pb2.ProposeResponse:
    return draft_pb2.ProposeResponse(
        round=request.round,
        token_ids=done.result.token_ids,
        cached_len=done.result.cached_len,
        time=worker_time(done),
        reused_len=session.cache.reused_len,
        distributions=map(to_distribution, done.result.distributions),
        confidences=done.result.confidences,
    )

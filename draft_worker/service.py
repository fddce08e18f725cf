"""DraftService: the draft worker's gRPC edge."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

import grpc

from draft_worker.proposal import Proposal, go_ahead, propose
from draft_worker.session import DraftSession
from specd.deferred import Deferred
from specd.errors import InvalidRequestError
from specd.sampling import check_token_ids
from specd.sampling_messages import to_distribution
from specd.settings import MAX_NUM_DRAFT_TOKENS
from specd.v1 import draft_pb2, draft_pb2_grpc
from specd.worker.engine import Done, Steps
from specd.worker.requests import check_request
from specd.worker.session_stream import SessionStreams, worker_time
from specd.worker.worker import Worker


class DraftService(draft_pb2_grpc.DraftServiceServicer):
    """Proposes tokens, one stream a session."""

    def __init__(self, worker: Deferred[Worker]) -> None:
        self._streams = SessionStreams(worker, new_session=DraftSession, begin=_begin, answer=_answer, go_on=_go_on)

    async def Propose(
        self,
        request_iterator: AsyncIterator[draft_pb2.ProposeRequest],
        context: grpc.aio.ServicerContext[draft_pb2.ProposeRequest, draft_pb2.ProposeResponse],
    ) -> None:
        """Serve one session."""
        await self._streams.serve(context)


def _begin(worker: Worker, session: DraftSession, request: draft_pb2.ProposeRequest) -> Steps[Proposal]:
    token_ids = list(request.token_ids)
    model = worker.model.info
    check_request(
        model,
        request.position,
        token_ids,
        num_draft_tokens=request.num_draft_tokens,
        num_ahead_tokens=request.num_ahead_tokens,
    )
    if len(request.min_confidences) > MAX_NUM_DRAFT_TOKENS:
        raise InvalidRequestError(
            "OUT_OF_RANGE",
            f"min_confidences has {len(request.min_confidences)} entries: the most is {MAX_NUM_DRAFT_TOKENS}",
        )
    for field, values in (
        ("min_confidences", request.min_confidences),
        ("min_ahead_confidence", [request.min_ahead_confidence]),
    ):
        for value in values:
            if not 0 <= value <= 1:
                raise InvalidRequestError("OUT_OF_RANGE", f"{field} has {value:g}: it must be in [0, 1]")
    if request.num_ahead_tokens and not request.num_draft_tokens:
        raise InvalidRequestError(
            "CONTRADICTION", f"num_ahead_tokens is {request.num_ahead_tokens}, but num_draft_tokens is 0"
        )
    if target_size := session.sampler.sampling.vocabulary_size:
        # The penalties look tokens up in the rows that are left of the logits.
        check_token_ids("token_ids", token_ids, vocabulary_size=target_size, model_name="the target")
    return propose(
        session,
        request.position,
        token_ids,
        request.num_draft_tokens,
        chunk=worker.chunk,
        min_confidences=list(request.min_confidences),
    )


def _go_on(session: DraftSession, request: draft_pb2.ProposeRequest, proposal: Proposal) -> Steps[Proposal] | None:
    if not request.num_ahead_tokens or math.prod(proposal.confidences) < request.min_ahead_confidence:
        return None
    return go_ahead(
        session,
        proposal.token_ids,
        request.position + len(request.token_ids),
        request.num_ahead_tokens,
        min_confidences=list(request.min_confidences),
        min_ahead_confidence=request.min_ahead_confidence,
    )


def _answer(
    session: DraftSession, request: draft_pb2.ProposeRequest, done: Done[Proposal]
) -> draft_pb2.ProposeResponse:
    return draft_pb2.ProposeResponse(
        round=request.round,
        token_ids=done.result.token_ids,
        cached_len=done.result.cached_len,
        time=worker_time(done),
        reused_len=session.cache.reused_len,
        distributions=map(to_distribution, done.result.distributions),
        confidences=done.result.confidences,
        is_ahead=done.result.is_ahead,
    )

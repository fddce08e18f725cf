"""TargetService: the target worker's gRPC edge."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial

import grpc

from specd.errors import InvalidRequestError
from specd.rpc.deferred import Deferred
from specd.rpc.messages import distribution_from, to_log_probabilities, to_margin
from specd.rpc.multiplex_service import MultiplexService
from specd.v1 import multiplex_pb2_grpc, target_pb2, target_pb2_grpc
from specd.worker.engine.jobs import Done, FirstResult, Steps
from specd.worker.sampling.distribution import check_samples, decode_distributions
from specd.worker.session.grammar_masks import Allowed
from specd.worker.session.self_draft import SelfProposal
from specd.worker.session.stream import SessionStreams, Worker, WorkerSession, worker_time
from specd.worker.session.validation import check_confidences, check_count, check_request
from target_worker.verification import Verification, verify


class TargetService(target_pb2_grpc.TargetServiceServicer):
    """Verifies proposals, one stream a session."""

    def __init__(self, worker: Deferred[Worker]) -> None:
        self.streams = SessionStreams(worker, begin=_begin, answer=_answer)

    async def Verify(
        self,
        request_iterator: AsyncIterator[target_pb2.VerifyRequest],
        context: grpc.aio.ServicerContext[target_pb2.VerifyRequest, target_pb2.VerifyResponse],
    ) -> None:
        """Serve one session."""
        await self.streams.serve(context)


def add_services(worker: Deferred[Worker], server: grpc.aio.Server) -> None:
    """Serve sessions, each in a call of its own or several in one."""
    service = TargetService(worker)
    target_pb2_grpc.add_TargetServiceServicer_to_server(service, server)
    multiplexing = MultiplexService(
        lambda: worker.get().incarnation, service.streams.serve, target_pb2.VerifyRequest.FromString
    )
    multiplex_pb2_grpc.add_MultiplexServiceServicer_to_server(multiplexing, server)


def _begin(
    worker: Worker, session: WorkerSession, request: target_pb2.VerifyRequest
) -> Steps[Verification | SelfProposal]:
    token_ids, proposal = list(request.token_ids), list(request.proposal)
    model, sampling = worker.model.info, session.sampler.sampling
    check_request(model, request.position, token_ids, proposal=proposal)
    if request.num_draft_tokens and worker.self_draft is None:
        raise InvalidRequestError(
            "OUT_OF_RANGE",
            f"num_draft_tokens is {request.num_draft_tokens}, but this worker has no draft of its own: start it with "
            "--self-draft, or send 0",
        )
    check_count("num_draft_tokens", request.num_draft_tokens)
    check_confidences(request.min_confidences)
    if 0 < sampling.vocabulary_size < model.vocabulary_size:
        raise InvalidRequestError(
            "OUT_OF_RANGE",
            f"vocabulary_size is {sampling.vocabulary_size}, but the target {model.name} has {model.vocabulary_size} "
            "tokens: send that number",
        )
    num_distributions = len(proposal) if session.sampler.rejects else 0
    # Checked before the distributions are read, because each takes memory for the whole vocabulary.
    may_keep_some = session.drafter is not None and len(request.distributions) < num_distributions
    if len(request.distributions) != num_distributions and not may_keep_some:
        raise InvalidRequestError(
            "BROKEN_DISTRIBUTION",
            f"distributions has {len(request.distributions)} entries, but acceptance by {sampling.acceptance.name} of "
            f"{len(proposal)} proposed tokens needs {num_distributions}",
        )
    if session.masks is None and sampling.grammar is not None:
        session.masks = worker.grammar_masks.begin(sampling.grammar)
    allowed = session.masks.start(request.position, token_ids, proposal) if session.masks is not None else None
    return _verify(worker, session, request, token_ids, proposal, allowed)


def _verify(
    worker: Worker,
    session: WorkerSession,
    request: target_pb2.VerifyRequest,
    token_ids: Sequence[int],
    proposal: Sequence[int],
    allowed: Allowed | None,
) -> Steps[Verification | SelfProposal]:
    # This runs in the job, not on the event loop, because 32 distributions over 150,000 tokens are 19 MB.
    distributions = [distribution_from(message) for message in request.distributions]
    drafter = session.drafter
    if drafter is not None and session.sampler.rejects:
        distributions = [*drafter.distributions(proposal[: len(proposal) - len(distributions)]), *distributions]
    rows = decode_distributions(distributions, worker.model.info.vocabulary_size)
    if distributions:
        check_samples(rows, proposal)
    will_draft = drafter is not None and request.num_draft_tokens > 0
    verification = yield from verify(
        session.cache,
        session.sampler,
        request.position,
        token_ids,
        proposal,
        rows,
        chunk=worker.chunk,
        pad=partial(_pad, worker, request.position + len(token_ids)),
        # The grammar's mask of a token needs the token before it.
        runs_ahead=not will_draft and allowed is None and _runs_ahead(worker, request.position + len(token_ids)),
        logit_rounding=worker.rounding_of(session.cache),
        allowed=allowed,
    )
    if drafter is not None and not will_draft:
        yield from drafter.keep_up(session.cache, verification.next_token_id)
    if drafter is None or not will_draft:
        return verification
    yield FirstResult(verification)
    return (
        yield from drafter.propose(
            session.cache, verification.next_token_id, request.num_draft_tokens, list(request.min_confidences)
        )
    )


def _pad(worker: Worker, session_len: int, width: int) -> int:
    """Return the fastest width, at least `width`, for a session that has the worker to itself."""
    if worker.engine.num_active_sessions > 1:
        return width
    padded = worker.costs.cheapest_width(1, width)
    return padded if session_len + padded <= worker.model.info.context_length else width


def _runs_ahead(worker: Worker, session_len: int) -> bool:
    """Return whether to start the next steps: where it takes no cores, for a session that has the worker to itself."""
    has_room = session_len + 2 < worker.model.info.context_length
    return has_room and worker.runs_ahead and worker.engine.num_active_sessions <= 1


def _answer(
    session: WorkerSession, request: target_pb2.VerifyRequest, done: Done[Verification | SelfProposal]
) -> target_pb2.VerifyResponse:
    if isinstance(done.result, SelfProposal):
        own = done.result
        return target_pb2.VerifyResponse(
            round=request.round,
            self_proposal=target_pb2.SelfProposal(
                token_ids=own.token_ids, confidences=own.confidences, time=worker_time(done), fault=own.fault
            ),
        )
    return target_pb2.VerifyResponse(
        round=request.round,
        num_accepted=done.result.num_accepted,
        next_token_id=done.result.next_token_id,
        cached_len=done.result.cached_len,
        time=worker_time(done),
        reused_len=session.cache.reused_len,
        log_probabilities=map(to_log_probabilities, done.result.log_probabilities),
        prompt_log_probabilities=map(to_log_probabilities, done.result.prompt_log_probabilities),
        margins=map(to_margin, done.result.margins),
    )

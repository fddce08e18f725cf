"""One session's stream to a worker: messages, round numbers, timers, and errors in plain terms."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

import grpc

from coordinator.core import Exchange, Plan, Proposal, SessionSetup, Verdict
from coordinator.workers.errors import WorkerError, WorkerFullError, WorkerLateError, WorkerLostError
from specd.errors import error_info
from specd.rpc.messages import distribution_from, log_probabilities_from, to_distribution, to_session_sampling
from specd.sampling import Acceptance, certain
from specd.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

Request = TypeVar("Request", draft_pb2.ProposeRequest, target_pb2.VerifyRequest)
Response = TypeVar("Response", draft_pb2.ProposeResponse, target_pb2.VerifyResponse)

# Codes after which the same request can succeed on a new stream: the worker went away (UNAVAILABLE, CANCELLED), shut
# down, or does not hold the tokens that it was thought to (CACHE_TOO_SHORT).
_LOST_CODES = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.ABORTED,
    }
)
# grpc.aio puts this, with INTERNAL, in place of the real status when a write meets the end of its stream.
_FAILED_WRITE = "Internal error from Core"


class WorkerStream(Generic[Request, Response]):
    """One bidirectional call. Requests are numbered, and an answer to an older one is dropped.

    The first request carries the session's sampling, source and namespace.
    """

    def __init__(self, call: grpc.aio.StreamStreamCall[Request, Response], setup: SessionSetup, *, worker: str) -> None:
        """Use an open call to the "draft" or "target" worker."""
        self._call: Any = call
        self._setup = setup
        self._worker = worker
        self._request: Request | None = None
        self._sent_at = 0.0
        self._sent_bytes = 0
        self._ended: WorkerError | None = None
        self._answered: asyncio.Future[Response | WorkerError] = asyncio.get_running_loop().create_future()
        # One reader for the life of the stream: to cancel a single read would cancel the whole call.
        self._reading = asyncio.ensure_future(self._read())

    def close(self) -> None:
        """End the stream; the worker frees the session."""
        self._reading.cancel()
        self._call.cancel()

    async def _send(self, request: Request, timeout_seconds: float) -> None:
        """Number and send a request, which supersedes an unanswered one. Raises WorkerError."""
        request.round = 1 if self._request is None else self._request.round + 1
        if self._request is None:
            request.sampling.CopyFrom(to_session_sampling(self._setup.sampling))
            request.source_token_ids.extend(self._setup.source)
            request.namespace = self._setup.namespace
        self._request = request
        self._sent_at = time.perf_counter()
        self._answered = asyncio.get_running_loop().create_future()
        if self._ended is not None:
            raise self._ended
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._call.write(request)
        except TimeoutError:
            # A write that is cancelled cancels the call: the stream is lost, not only late.
            late = self._late(timeout_seconds)
            self._ended = WorkerLostError(late.reason, str(late))
            raise self._ended from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._reading  # it has the same news, with the status
            assert self._ended is not None
            raise self._ended from None
        # Only now, while the worker computes: with distributions it takes a while.
        self._sent_bytes = request.ByteSize()

    async def _receive(self, timeout_seconds: float) -> tuple[Response, Exchange]:
        """Wait for the answer to the last request. Raises WorkerError."""
        timer = asyncio.get_running_loop().call_later(timeout_seconds, self._settle, self._late(timeout_seconds))
        try:
            answer = await self._answered
        finally:
            timer.cancel()
        if isinstance(answer, WorkerError):
            raise answer
        assert self._request is not None
        elapsed, spent = time.perf_counter() - self._sent_at, answer.time
        return answer, Exchange(
            spent.queue_seconds,
            spent.compute_seconds,
            wire_seconds=max(elapsed - spent.queue_seconds - spent.compute_seconds, 0.0),
            wire_bytes=self._sent_bytes + answer.ByteSize(),
            num_sessions=spent.num_sessions,
            step_tokens=spent.step_tokens,
            num_tokens=len(self._request.token_ids),
            sent_at=self._sent_at,
        )

    async def _read(self) -> None:
        try:
            while (response := cast(Any, await self._call.read())) is not grpc.aio.EOF:
                if self._request is not None and response.round == self._request.round:
                    self._settle(response)
            self._ended = WorkerLostError(self._reason("UNAVAILABLE"), f"the {self._worker} worker ended the stream")
        except grpc.aio.AioRpcError as error:
            self._ended = self._error(error)
        except Exception as error:  # an answer that cannot be parsed, for one, comes as None
            self._ended = WorkerError(
                self._reason("BROKEN"), f"the {self._worker} worker's answer is broken: {error!r}"
            )
        self._settle(self._ended)

    def _error(self, error: grpc.aio.AioRpcError) -> WorkerError:
        code, details = error.code(), error.details() or ""
        message = f"{code.name} from the {self._worker} worker: {details}"
        reason = error_info(error).reason
        if reason == "CACHE_FULL":
            return WorkerFullError(reason, message)
        kind = WorkerLostError if code in _LOST_CODES or details == _FAILED_WRITE else WorkerError
        return kind(reason or self._reason(code.name), message)

    def _settle(self, answer: Response | WorkerError) -> None:
        if not self._answered.done():
            self._answered.set_result(answer)

    def _late(self, timeout_seconds: float) -> WorkerLateError:
        message = f"no answer from the {self._worker} worker in {timeout_seconds:g} s"
        return WorkerLateError(self._reason("LATE"), message)

    def _reason(self, what: str) -> str:
        return f"{self._worker.upper()}_{what}"


class GrpcDraftStream(WorkerStream[draft_pb2.ProposeRequest, draft_pb2.ProposeResponse]):
    """A `DraftStream` over gRPC."""

    def __init__(self, channel: grpc.aio.Channel, setup: SessionSetup) -> None:
        """Open the stream of a session on the channel of the draft worker."""
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        super().__init__(stub.Propose(metadata=(("specd-session-id", setup.session_id),)), setup, worker="draft")

    async def ask(self, position: int, token_ids: Sequence[int], plan: Plan, timeout_seconds: float) -> None:
        """Send a request. Raises WorkerError."""
        k, least = plan.num_draft_tokens, plan.min_confidences
        await self._send(
            draft_pb2.ProposeRequest(position=position, token_ids=token_ids, num_draft_tokens=k, min_confidences=least),
            timeout_seconds,
        )

    async def answer(self, timeout_seconds: float) -> Proposal:
        """Wait for the proposal. Raises WorkerError."""
        response, exchange = await self._receive(timeout_seconds)
        return Proposal(
            list(response.token_ids),
            [distribution_from(message) for message in response.distributions],
            response.cached_len,
            response.reused_len,
            exchange,
            confidences=list(response.confidences),
        )


class GrpcTargetStream(WorkerStream[target_pb2.VerifyRequest, target_pb2.VerifyResponse]):
    """A `TargetStream` over gRPC."""

    def __init__(self, channel: grpc.aio.Channel, setup: SessionSetup) -> None:
        """Open the stream of a session on the channel of the target worker."""
        stub = target_pb2_grpc.TargetServiceStub(channel)
        super().__init__(stub.Verify(metadata=(("specd-session-id", setup.session_id),)), setup, worker="target")
        self._rejects = setup.sampling.acceptance is Acceptance.REJECTION

    async def verify(
        self, position: int, token_ids: Sequence[int], proposal: Proposal, timeout_seconds: float
    ) -> Verdict:
        """Run one round. Raises WorkerError."""
        request = target_pb2.VerifyRequest(position=position, token_ids=token_ids, proposal=proposal.token_ids)
        if self._rejects:
            looked_up = map(certain, proposal.token_ids[proposal.num_drafted :])
            request.distributions.extend(map(to_distribution, (*proposal.distributions, *looked_up)))
        await self._send(request, timeout_seconds)
        response, exchange = await self._receive(timeout_seconds)
        return Verdict(
            response.num_accepted,
            response.next_token_id,
            response.cached_len,
            response.reused_len,
            [log_probabilities_from(message) for message in response.log_probabilities],
            exchange,
        )

"""One session's stream to a worker: messages, round numbers, timers, and errors in plain terms."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

import grpc

from coordinator.core import Exchange, Part, Plan, Proposal, SessionSetup, Verdict
from coordinator.workers.errors import WorkerError, WorkerFullError, WorkerLateError, WorkerLostError
from specd.errors import error_info
from specd.grammar import GRAMMAR_BROKEN
from specd.rpc.messages import (
    INCARNATION,
    distribution_from,
    log_probabilities_from,
    margin_from,
    to_distribution,
    to_session_sampling,
)
from specd.sampling import MAX_TOP_LOG_PROBABILITIES, Acceptance, certain
from specd.setting_types import MAX_NUM_DRAFT_TOKENS
from specd.v1 import draft_pb2, model_pb2, target_pb2
from specd.vocabulary import TokenSource

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
# The reasons of workers for programs.
_REASONS = frozenset(
    {
        "BROKEN_DISTRIBUTION",
        "BROKEN_MESSAGE",
        "CACHE_FULL",
        "CACHE_TOO_SHORT",
        "CONTEXT_EXCEEDED",
        "CONTRADICTION",
        "EMPTY_TOKEN_IDS",
        "NON_FINITE_LOGITS",
        "OUT_OF_RANGE",
        "STARTING",
        "STOPPING",
        "TOKEN_OUT_OF_VOCABULARY",
    }
)
_SECONDS_TO_END = 5.0  # for a worker to end its stream after the last request
_MOST_CHARACTERS = 500  # in a worker's error
_MOST_SESSIONS, _MOST_STEP_TOKENS = 2**12, 2**20  # of a step
# grpc.aio reports this, with INTERNAL, instead of the real status when a write meets the end of its stream.
_FAILED_WRITE = "Internal error from Core"


class WorkerStream(Generic[Request, Response]):
    """One bidirectional call. Requests are numbered, and an answer to an older one is dropped.

    The first request carries the session's sampling, source, namespace and adapter.
    """

    def __init__(self, call: Any, setup: SessionSetup, incarnation: str, *, worker: str) -> None:
        """Use an open call to the "draft" or "target" worker, which must have this incarnation.

        The call is a `grpc.aio.StreamStreamCall`, or a stream in a call that sessions share.
        """
        self._call = call
        self._setup = setup
        self._incarnation = incarnation
        self._worker = worker
        self._request: Request | None = None
        self._is_at_work = False  # whether the worker computes for this request
        self._sent_at = 0.0
        self._sent_bytes = 0
        self._ended: WorkerError | None = None
        self._num_expected = 0  # answers to all requests
        self._answered: asyncio.Future[Response | WorkerError] = asyncio.get_running_loop().create_future()
        self._followed: asyncio.Future[Response | WorkerError] | None = None  # by a second answer, if it is asked for
        # One reader for the life of the stream, because cancelling a single read would cancel the whole call.
        self._reading = asyncio.ensure_future(self._read())
        self._ending: asyncio.Future[None] | None = None

    def close(self) -> None:
        """End the stream; the worker frees the session.

        It cancels the call only if the worker computes for it or does not end: for each cancelled call, grpc.aio leaks
        at least 80 bytes, here and in the worker (grpc/grpc#43360).
        """
        if self._is_at_work:
            self._call.cancel()
        else:
            self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SECONDS_TO_END):
                await self._call.done_writing()
                await asyncio.shield(self._reading)
        self._call.cancel()  # without effect on an ended call

    async def _send(self, request: Request, timeout_seconds: float, *, asks_twice: bool = False) -> None:
        """Number and send a request, which supersedes an unanswered one. Raises WorkerError.

        `asks_twice` is whether it has two answers.
        """
        request.round = 1 if self._request is None else self._request.round + 1
        if self._request is None:
            request.sampling.CopyFrom(to_session_sampling(self._setup.sampling))
            request.source_token_ids.extend(self._setup.source)
            request.namespace = self._setup.namespace
            request.adapter = self._setup.adapter
        self._request = request
        self._is_at_work = True
        self._sent_at = time.perf_counter()
        self._answered = asyncio.get_running_loop().create_future()
        self._followed = asyncio.get_running_loop().create_future() if asks_twice else None
        self._num_expected += 1 + asks_twice
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
            await self._reading  # the reader gets the same error, with the status
            assert self._ended is not None
            raise self._ended from None
        # Computed now, while the worker computes, because with distributions it takes a while.
        self._sent_bytes = request.ByteSize()

    async def _receive(self, timeout_seconds: float) -> tuple[Response, Exchange]:
        """Wait for the answer to the last request. Raises WorkerError."""
        answer = await self._wait(self._answered, timeout_seconds)
        assert self._request is not None
        return answer, _exchange(
            answer.time,
            self._sent_at,
            wire_bytes=self._sent_bytes + answer.ByteSize(),
            num_tokens=len(self._request.token_ids),
        )

    async def _wait(self, answered: asyncio.Future[Response | WorkerError], timeout_seconds: float) -> Response:
        timer = asyncio.get_running_loop().call_later(timeout_seconds, self._fail, self._late(timeout_seconds))
        try:
            answer = await answered
        finally:
            timer.cancel()
        if isinstance(answer, WorkerError):
            raise answer
        return answer

    async def _read_answers(self, *, is_other_life: bool) -> WorkerError:
        """Read to the end of the stream, or to an answer without a request; return its error."""
        num_answers = 0
        while (response := cast(Any, await self._call.read())) is not grpc.aio.EOF:
            if is_other_life:
                return self._replaced()
            num_asked = self._request.round if self._request is not None else 0
            num_answers += 1
            is_expected = num_answers <= self._num_expected and response.round <= num_asked
            if is_expected and response.round == num_asked and self._is_second(response):
                is_expected = self._followed is not None and self._answered.done()
            if not is_expected:
                return WorkerError(self._reason("BROKEN"), f"the {self._worker} worker answered without a request")
            if response.round < num_asked:
                continue
            if self._is_second(response):
                assert self._followed is not None
                _set(self._followed, response)
            else:
                self._is_at_work = False
                _set(self._answered, response)
        return WorkerLostError(self._reason("UNAVAILABLE"), f"the {self._worker} worker ended the stream")

    async def _read(self) -> None:
        said = None
        try:
            said = (await self._call.initial_metadata()).get(INCARNATION)
            self._ended = await self._read_answers(is_other_life=said != self._incarnation)
            self._call.cancel()
        except grpc.aio.AioRpcError as error:
            # Without metadata, no worker has answered, or a proxy has.
            self._ended = self._error(error) if said in {None, self._incarnation} else self._replaced()
        except Exception as error:  # an answer that cannot be parsed, for one, comes as None
            self._ended = WorkerError(
                self._reason("BROKEN"), f"the {self._worker} worker's answer is broken: {error!r}"
            )
        except asyncio.CancelledError:  # not of this task: grpc.aio raises it where a call, or its channel, was closed
            closed = f"the stream to the {self._worker} worker was closed"
            self._ended = self._ended or WorkerLostError(self._reason("UNAVAILABLE"), closed)
        self._fail(self._ended)

    def _error(self, error: grpc.aio.AioRpcError) -> WorkerError:
        code, details = error.code(), error.details() or ""
        shown = "".join(character if character.isprintable() else " " for character in details[:_MOST_CHARACTERS])
        message = f"{code.name} from the {self._worker} worker: {shown}"
        reason = error_info(error).reason
        if reason == "CACHE_FULL":
            return WorkerFullError(reason, message)
        if reason == GRAMMAR_BROKEN:  # by the client's request, which this is about
            return WorkerError(reason, shown)
        kind = WorkerLostError if code in _LOST_CODES or details == _FAILED_WRITE else WorkerError
        # Reasons become labels of metrics, so their number must be bounded.
        return kind(reason if reason in _REASONS else self._reason(code.name), message)

    def _replaced(self) -> WorkerError:
        message = f"another {self._worker} worker answers than the one whose model was checked"
        return WorkerLostError(self._reason("REPLACED"), message)

    def _is_second(self, response: Response) -> bool:
        """Return whether this is the second answer to a request."""
        return False

    def _fail(self, error: WorkerError) -> None:
        """End the wait for answers."""
        for answered in (self._answered, self._followed):
            if answered is not None:
                _set(answered, error)

    def _late(self, timeout_seconds: float) -> WorkerLateError:
        message = f"no answer from the {self._worker} worker in {timeout_seconds:g} s"
        return WorkerLateError(self._reason("LATE"), message)

    def _reason(self, what: str) -> str:
        return f"{self._worker.upper()}_{what}"


def _set(answered: asyncio.Future[Any], answer: Response | WorkerError) -> None:
    if not answered.done():
        answered.set_result(answer)


def _exchange(spent: model_pb2.WorkerTime, sent_at: float, *, wire_bytes: int, num_tokens: int = 0) -> Exchange:
    """Return the exchange for which the caller has waited since `sent_at`.

    The reported times of a lying worker are cut to the measured time. The order of the arguments makes NaN 0.
    """
    elapsed = time.perf_counter() - sent_at
    compute_seconds = min(max(0.0, spent.compute_seconds), elapsed)
    queue_seconds = min(max(0.0, spent.queue_seconds), elapsed - compute_seconds)
    return Exchange(
        queue_seconds,
        compute_seconds,
        wire_seconds=max(elapsed - queue_seconds - compute_seconds, 0.0),  # rounding can make it negative
        wire_bytes=wire_bytes,
        num_sessions=min(max(spent.num_sessions, 1), _MOST_SESSIONS),
        step_tokens=min(max(spent.step_tokens, 1), _MOST_STEP_TOKENS),
        num_tokens=num_tokens,
        sent_at=sent_at,
    )


class GrpcDraftStream(WorkerStream[draft_pb2.ProposeRequest, draft_pb2.ProposeResponse]):
    """A `DraftStream` over gRPC."""

    def __init__(self, call: Any, setup: SessionSetup, incarnation: str) -> None:
        """Use an open call to a draft worker."""
        super().__init__(call, setup, incarnation, worker="draft")

    async def ask(self, position: int, token_ids: Sequence[int], plan: Plan, timeout_seconds: float) -> None:
        """Send a request. Raises WorkerError."""
        k, least = plan.limit(TokenSource.DRAFT), plan.min_confidences
        await self._send(
            draft_pb2.ProposeRequest(position=position, token_ids=token_ids, num_draft_tokens=k, min_confidences=least),
            timeout_seconds,
        )

    async def answer(self, timeout_seconds: float) -> Part:
        """Wait for the draft's part of a proposal. Raises WorkerError."""
        response, exchange = await self._receive(timeout_seconds)
        num_entries = max(map(len, (response.token_ids, response.distributions, response.confidences)))
        if num_entries > MAX_NUM_DRAFT_TOKENS:  # before they are copied, because there can be millions
            raise WorkerError("DRAFT_BROKEN", f"the draft worker answered with {num_entries} entries of a kind")
        return Part(
            TokenSource.DRAFT,
            list(response.token_ids),
            [distribution_from(message) for message in response.distributions],
            list(response.confidences),
            response.cached_len,
            response.reused_len,
            exchange,
        )


class GrpcTargetStream(WorkerStream[target_pb2.VerifyRequest, target_pb2.VerifyResponse]):
    """A `TargetStream` over gRPC."""

    def __init__(self, call: Any, setup: SessionSetup, incarnation: str) -> None:
        """Use an open call to a target worker."""
        super().__init__(call, setup, incarnation, worker="target")
        self._rejects = setup.sampling.acceptance is Acceptance.REJECTION
        self._wants_log_probabilities = setup.sampling.top_log_probabilities is not None
        self._wants_those_of_prompt = setup.sampling.prompt_log_probabilities

    async def verify(
        self, position: int, token_ids: Sequence[int], proposal: Proposal, ahead: Plan, timeout_seconds: float
    ) -> Verdict:
        """Run one round, and ask for the draft tokens of the next one as planned ahead. Raises WorkerError."""
        k = ahead.limit(TokenSource.DRAFT)
        request = target_pb2.VerifyRequest(
            position=position,
            token_ids=token_ids,
            proposal=proposal.token_ids,
            num_draft_tokens=k,
            min_confidences=ahead.min_confidences if k else (),
        )
        if self._rejects:
            for part in proposal.parts:
                if part.from_target:  # it has kept their distributions
                    continue
                distributions = part.distributions or map(certain, part.token_ids)
                request.distributions.extend(map(to_distribution, distributions))
        await self._send(request, timeout_seconds, asks_twice=k > 0)
        response, exchange = await self._receive(timeout_seconds)
        log_probabilities = response.log_probabilities if self._wants_log_probabilities else ()
        of_prompt = response.prompt_log_probabilities if self._wants_those_of_prompt else ()
        num_values = len(log_probabilities) + len(of_prompt)
        # Checked before they are copied, because there can be millions.
        if num_values > len(token_ids) + MAX_NUM_DRAFT_TOKENS + 1 or any(
            len(each.top_model) + len(each.top_sampling) > 2 * MAX_TOP_LOG_PROBABILITIES
            for each in (*log_probabilities, *of_prompt)
        ):
            raise WorkerError("TARGET_BROKEN", f"the target worker sent {num_values} log-probabilities")
        if len(response.margins) > MAX_NUM_DRAFT_TOKENS + 1:
            raise WorkerError("TARGET_BROKEN", f"the target worker sent {len(response.margins)} margins")
        return Verdict(
            response.num_accepted,
            response.next_token_id,
            response.cached_len,
            response.reused_len,
            [log_probabilities_from(message) for message in log_probabilities],
            exchange,
            prompt_log_probabilities=[log_probabilities_from(message) for message in of_prompt],
            margins=[margin_from(message) for message in response.margins],
        )

    async def proposal(self, timeout_seconds: float) -> Part:
        """Wait for the target's own draft tokens after the last verdict, if they were asked for. Raises WorkerError."""
        if self._followed is None:
            return Part(TokenSource.DRAFT, from_target=True)
        began_at = time.perf_counter()
        response = await self._wait(self._followed, timeout_seconds)
        own = response.self_proposal
        num_entries = max(len(own.token_ids), len(own.confidences))
        if num_entries > MAX_NUM_DRAFT_TOKENS:  # before they are copied, because there can be millions
            raise WorkerError("TARGET_BROKEN", f"the target worker proposed {num_entries} entries of a kind")
        fault = f"DRAFT_{own.fault}" if own.fault in _REASONS else "DRAFT_FAILED" if own.fault else ""
        exchange = _exchange(own.time, began_at, wire_bytes=response.ByteSize())
        return Part(
            TokenSource.DRAFT,
            list(own.token_ids),
            confidences=list(own.confidences),
            exchange=exchange,
            fault=fault,
            from_target=True,
        )

    def _is_second(self, response: target_pb2.VerifyResponse) -> bool:
        return response.HasField("self_proposal")

"""The coordinator's end of one session's stream to a worker: requests, rounds, timers, and errors in plain terms."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import grpc

from coordinator.round import Exchange
from specd.errors import error_info
from specd.sampling import Sampling
from specd.sampling_messages import to_session_sampling
from specd.v1 import model_pb2, sampling_pb2


class WorkerError(Exception):
    """A worker did not answer a request; `reason` is for programs, the message for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class WorkerLostError(WorkerError):
    """The stream broke: the worker died, restarted, or no longer holds the session. A new stream can help."""


class WorkerFullError(WorkerError):
    """The worker has no room for the session now, and has ended its stream."""


class WorkerLateError(WorkerError):
    """No answer in time. The stream is still open, and the worker perhaps still at work."""


class _Message(Protocol):
    def ByteSize(self) -> int: ...  # noqa: N802


class _Request(_Message, Protocol):
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def sampling(self) -> sampling_pb2.SessionSampling: ...


class _Response(_Message, Protocol):
    @property
    def round(self) -> int: ...
    @property
    def time(self) -> model_pb2.WorkerTime: ...


Request = TypeVar("Request", bound=_Request)
Response = TypeVar("Response", bound=_Response)

# Codes after which the same request, on a new stream, can succeed: the worker went away (UNAVAILABLE, CANCELLED), shut
# down, or does not hold what we thought (CACHE_TOO_SHORT).
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
    """One bidirectional call. Requests are numbered; an answer to an older one is dropped. One can have two answers.

    The first request says how the session's tokens are chosen.
    """

    def __init__(self, call: grpc.aio.StreamStreamCall[Request, Response], sampling: Sampling, *, worker: str) -> None:
        """Use an open call to the worker of this name ("draft" or "target")."""
        self._call = call
        self._sampling = sampling
        self._worker = worker
        self._round = 0
        self._sent_at = 0.0
        self._sent_bytes = 0
        self._sent_tokens = 0
        self._ended: WorkerError | None = None
        self._second: Response | None = None
        self._answer: asyncio.Future[Response | WorkerError] = asyncio.get_running_loop().create_future()
        # One reader for the life of the stream: cancelling a single read would cancel the whole call.
        self._reading = asyncio.ensure_future(self._read())

    @property
    def next_round(self) -> int:
        """The number that the next request must carry."""
        return self._round + 1

    async def send(self, request: Request, timeout_seconds: float) -> None:
        """Send the next request, which supersedes one that is not answered yet. Raises WorkerError."""
        if self._round == 0:
            request.sampling.CopyFrom(to_session_sampling(self._sampling))
        self._round += 1
        self._second = None
        self._sent_tokens = len(request.token_ids)
        self._sent_at = time.perf_counter()
        self._answer = asyncio.get_running_loop().create_future()
        if self._ended is not None:
            raise self._ended
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._call.write(request)
        except TimeoutError:
            # A write that is cancelled cancels the call, so that this is no longer only late.
            late = self._late(timeout_seconds)
            self._ended = WorkerLostError(late.reason, str(late))
            raise self._ended from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._reading  # which has the same news, with the status
            assert self._ended is not None
            raise self._ended from None
        # Only now, while the worker computes: with distributions it takes a while.
        self._sent_bytes = request.ByteSize()

    async def receive(self, timeout_seconds: float) -> tuple[Response, Exchange]:
        """Wait for the answer to the last request. Raises WorkerError."""
        timer = asyncio.get_running_loop().call_later(timeout_seconds, self._settle, self._late(timeout_seconds))
        try:
            answer = await self._answer
        finally:
            timer.cancel()
        if isinstance(answer, WorkerError):
            raise answer
        elapsed = time.perf_counter() - self._sent_at
        queue_seconds, compute_seconds = answer.time.queue_seconds, answer.time.compute_seconds
        return answer, Exchange(
            queue_seconds,
            compute_seconds,
            wire_seconds=max(elapsed - queue_seconds - compute_seconds, 0.0),
            wire_bytes=self._sent_bytes + answer.ByteSize(),
            num_sessions=answer.time.num_sessions,
            step_tokens=answer.time.step_tokens,
            num_tokens=self._sent_tokens,
            sent_at=self._sent_at,
        )

    def take_both(self) -> tuple[Response, Response] | None:
        """Return both answers to the last request, once the second is there."""
        second, self._second = self._second, None
        if second is None:
            return None
        first = self._answer.result()
        return None if isinstance(first, WorkerError) else (first, second)  # else `second` is the first, but too late

    def close(self) -> None:
        """End the stream; the worker frees the session."""
        self._reading.cancel()
        self._call.cancel()

    async def _read(self) -> None:
        try:
            while (response := cast(Any, await self._call.read())) is not grpc.aio.EOF:
                if response.round == self._round:
                    if self._answer.done():
                        self._second = response
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
        if code in _LOST_CODES or details == _FAILED_WRITE:
            return WorkerLostError(reason or self._reason(code.name), message)
        return WorkerError(reason or self._reason(code.name), message)

    def _settle(self, answer: Response | WorkerError) -> None:
        if not self._answer.done():
            self._answer.set_result(answer)

    def _late(self, timeout_seconds: float) -> WorkerLateError:
        message = f"no answer from the {self._worker} worker in {timeout_seconds:g} s"
        return WorkerLateError(self._reason("LATE"), message)

    def _reason(self, what: str) -> str:
        return f"{self._worker.upper()}_{what}"

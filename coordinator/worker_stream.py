"""The coordinator's end of one session's stream to a worker: requests, rounds, timers, and errors in plain terms."""

from __future__ import annotations

import asyncio
import time
from typing import Generic, Protocol, TypeVar

import grpc

from coordinator.round import Exchange
from specd.errors import error_info
from specd.v1 import model_pb2


class WorkerError(Exception):
    """A worker did not answer a request; `reason` is for programs, the message for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class WorkerLostError(WorkerError):
    """The stream broke: the worker died, restarted, or no longer holds the session. A new stream can help."""


class WorkerLateError(WorkerError):
    """No answer in time. The stream is still open, and the worker perhaps still at work."""


class _Response(Protocol):
    @property
    def round(self) -> int: ...
    @property
    def time(self) -> model_pb2.WorkerTime: ...


Request = TypeVar("Request")
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


class WorkerStream(Generic[Request, Response]):
    """One bidirectional call. Requests are numbered; an answer to an older one is dropped."""

    def __init__(self, call: grpc.aio.StreamStreamCall[Request, Response], *, worker: str) -> None:
        """Use an open call to the worker of this name ("draft" or "target")."""
        self._call = call
        self._worker = worker
        self._round = 0
        self._sent_at = 0.0
        self._reading: asyncio.Future[Response] | None = None

    @property
    def next_round(self) -> int:
        """The number that the next request must carry."""
        return self._round + 1

    async def send(self, request: Request) -> None:
        """Send the next request, which supersedes one that is not answered yet. Raises WorkerError."""
        self._round += 1
        self._sent_at = time.perf_counter()
        try:
            await self._call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._error(error) from error

    async def receive(self, timeout_seconds: float) -> tuple[Response, Exchange]:
        """Wait for the answer to the last request. Raises WorkerError."""
        give_up_at = time.perf_counter() + timeout_seconds
        while True:
            # Cancelling a read would cancel the whole call, so a read that comes too late is left for the next round.
            if self._reading is None:
                self._reading = asyncio.ensure_future(self._call.read())  # type: ignore[arg-type]
                self._reading.add_done_callback(_mark_retrieved)
            await asyncio.wait({self._reading}, timeout=give_up_at - time.perf_counter())
            if not self._reading.done():
                reason = f"{self._worker.upper()}_LATE"
                raise WorkerLateError(reason, f"no answer from the {self._worker} worker in {timeout_seconds:g} s")
            reading, self._reading = self._reading, None
            try:
                response = reading.result()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                raise await self._error(error) from error
            if response is grpc.aio.EOF:  # type: ignore[comparison-overlap]
                raise WorkerLostError(self._reason("UNAVAILABLE"), f"the {self._worker} worker ended the stream")
            if response.round == self._round:
                return response, self._exchange(response.time)

    def close(self) -> None:
        """End the stream; the worker frees the session."""
        if self._reading is not None:
            self._reading.cancel()
        self._call.cancel()

    def _exchange(self, worker_time: model_pb2.WorkerTime) -> Exchange:
        elapsed = time.perf_counter() - self._sent_at
        queue_seconds, compute_seconds = worker_time.queue_seconds, worker_time.compute_seconds
        return Exchange(queue_seconds, compute_seconds, max(elapsed - queue_seconds - compute_seconds, 0.0))

    async def _error(self, error: grpc.aio.AioRpcError | asyncio.InvalidStateError) -> WorkerError:
        if isinstance(error, asyncio.InvalidStateError):  # a write on a call that has ended
            code, details, reason = await self._call.code(), await self._call.details() or "", ""
        else:
            code, details, reason = error.code(), error.details() or "", error_info(error).reason
        kind = WorkerLostError if code in _LOST_CODES else WorkerError
        return kind(reason or self._reason(code.name), f"{code.name} from the {self._worker} worker: {details}")

    def _reason(self, code: str) -> str:
        return f"{self._worker.upper()}_{code}"


def _mark_retrieved(task: asyncio.Future[Response]) -> None:
    """Keep asyncio from complaining of the error of a read that nobody waits for any more."""
    if not task.cancelled():
        task.exception()

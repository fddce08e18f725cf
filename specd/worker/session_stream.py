"""The server's end of a session: one bidirectional stream, one cache, and the latest request on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

import grpc
import structlog

from specd.deferred import Deferred
from specd.errors import InvalidRequestError, SpecdError, to_status
from specd.sampling import Sampling
from specd.sampling_messages import sampling_from
from specd.v1 import model_pb2, sampling_pb2
from specd.worker.engine import Done, Steps
from specd.worker.live_caches import LiveCaches
from specd.worker.sampler import Sampler
from specd.worker.session import WorkerSession
from specd.worker.session_cache import SessionCache
from specd.worker.worker import Worker

log = structlog.get_logger()


class _Request(Protocol):
    @property
    def round(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def sampling(self) -> sampling_pb2.SessionSampling: ...
    def HasField(self, field_name: Literal["sampling"]) -> bool: ...  # noqa: N802


Session = TypeVar("Session", bound=WorkerSession)
Request = TypeVar("Request", bound=_Request)
Response = TypeVar("Response")
Result = TypeVar("Result")


@dataclass(eq=False)
class _Asked(Generic[Request, Result]):
    """A request, and the job under way for it."""

    request: Request
    computing: asyncio.Future[Done[Result]]
    is_answered: bool = False
    is_superseded: bool = False

    def drop(self) -> bool:
        """Drop the job; returns whether the request remains without an answer."""
        self.is_superseded = True
        return self.computing.cancel() and not self.is_answered


class SessionStreams(Generic[Session, Request, Result, Response]):
    """Serves the sessions of one worker: the prefix protocol, whatever a request computes.

    `begin` checks a request and makes its steps, `answer` makes the response from what they return. `go_on` can make
    more steps once a response is sent, for another response, which the next request supersedes.
    """

    def __init__(
        self,
        worker: Deferred[Worker],
        *,
        new_session: Callable[[SessionCache, Sampler], Session],
        begin: Callable[[Worker, Session, Request], Steps[Result]],
        answer: Callable[[Session, Request, Done[Result]], Response],
        go_on: Callable[[Session, Request, Result], Steps[Result] | None] = lambda *_: None,
    ) -> None:
        self._deferred = worker
        self._new_session = new_session
        self._begin = begin
        self._answer = answer
        self._go_on = go_on

    async def serve(self, context: grpc.aio.ServicerContext[Request, Response]) -> None:
        """Serve one session until its stream ends, then leave its cache to the prefix cache, or free it on an error."""
        session_id = dict(context.invocation_metadata() or ()).get("specd-session-id", "")
        structlog.contextvars.bind_contextvars(session_id=session_id)
        try:
            await self._serve_session(self._deferred.get(), context)
        except (SpecdError, ExceptionGroup) as raised:
            error = raised.exceptions[0] if isinstance(raised, ExceptionGroup) else raised
            if isinstance(error, SpecdError):
                log.warning("request refused", reason=error.reason, error=str(error))
                await context.abort_with_status(to_status(error))
            log.error("request failed", exc_info=error)
            await context.abort(grpc.StatusCode.INTERNAL, "the worker failed on this request; its log says why")

    async def _serve_session(self, worker: Worker, context: grpc.aio.ServicerContext[Request, Response]) -> None:
        cache = SessionCache(worker.model, worker.prefixes)
        session = self._new_session(cache, Sampler(Sampling(), worker.model.info.vocabulary_size))
        worker.caches.add(cache)
        end = cache.keep
        log.debug("session opened")
        try:
            await self._serve_latest(worker, context, session)
        except Exception:
            end = cache.free
            worker.metrics.requests.labels("failed").inc()
            raise
        finally:
            # On the engine's thread: the step under way may still use it.
            worker.engine.run_soon(partial(_close, cache, worker.caches, end))
            log.debug("session closed")

    async def _serve_latest(
        self, worker: Worker, context: grpc.aio.ServicerContext[Request, Response], session: Session
    ) -> None:
        """Answer the latest request, dropping one that is not done when the next arrives."""
        latest: _Asked[Request, Result] | None = None
        writing = asyncio.Lock()
        try:
            async with asyncio.TaskGroup() as answers:
                while (request := cast(Any, await context.read())) is not grpc.aio.EOF:
                    if latest is not None and latest.drop():
                        worker.metrics.requests.labels("superseded").inc()
                    structlog.contextvars.bind_contextvars(round=request.round)
                    if request.HasField("sampling"):
                        if latest is not None:
                            raise InvalidRequestError(
                                "CONTRADICTION", "sampling is set in a later request: it holds from the first one on"
                            )
                        session.sampler = _sampler(worker, request.sampling)
                    steps = self._begin(worker, session, request)
                    worker.caches.reserve(session.cache, request.position + len(request.token_ids))
                    latest = _Asked(request, worker.engine.submit(_free_on_error(session.cache, steps), session.cache))
                    answers.create_task(self._write_answers(worker, context, session, latest, writing))
        finally:
            # A task that was cancelled before it began has not cancelled what it was to wait for.
            if latest is not None:
                latest.drop()

    async def _write_answers(
        self,
        worker: Worker,
        context: grpc.aio.ServicerContext[Request, Response],
        session: Session,
        asked: _Asked[Request, Result],
        writing: asyncio.Lock,
    ) -> None:
        done = await asked.computing
        await self._write(context, self._answer(session, asked.request, done), writing)
        worker.metrics.requests.labels("done").inc()
        worker.metrics.compute_seconds.observe(done.compute_seconds)
        worker.metrics.queue_seconds.observe(done.queue_seconds)
        more = self._go_on(session, asked.request, done.result)
        if more is not None and not asked.is_superseded:
            asked.is_answered = True
            asked.computing = worker.engine.submit(_free_on_error(session.cache, more))
            await self._write(context, self._answer(session, asked.request, await asked.computing), writing)

    async def _write(
        self, context: grpc.aio.ServicerContext[Request, Response], response: Response, writing: asyncio.Lock
    ) -> None:
        async with writing:  # gRPC takes one message at a time
            write = asyncio.ensure_future(context.write(response))
            try:
                await asyncio.shield(write)
            except asyncio.CancelledError:
                # Nor does it take a status meanwhile: the caller would wait for that for ever.
                await asyncio.gather(write, return_exceptions=True)
                raise


def worker_time(done: Done[Any]) -> model_pb2.WorkerTime:
    """Say where the time of a request went."""
    return model_pb2.WorkerTime(
        queue_seconds=done.queue_seconds,
        compute_seconds=done.compute_seconds,
        num_sessions=done.num_sessions,
        step_tokens=done.step_tokens,
    )


def _sampler(worker: Worker, message: sampling_pb2.SessionSampling) -> Sampler:
    sampling, model = sampling_from(message), worker.model.info
    vocabulary_size = min(sampling.vocabulary_size or model.vocabulary_size, model.vocabulary_size)
    sampling.check(vocabulary_size=vocabulary_size, model_name=model.name)
    return Sampler(sampling, model.vocabulary_size)


def _free_on_error(cache: SessionCache, steps: Steps[Result]) -> Steps[Result]:
    """Run a job; when it fails, its cache may hold anything, and must neither be used further nor kept.

    The stream alone cannot tell: nobody hears of the error of a job that was superseded, or cancelled with its stream.
    """
    try:
        return (yield from steps)
    except Exception:
        cache.free()
        raise


def _close(cache: SessionCache, caches: LiveCaches, end: Callable[[], None]) -> None:
    caches.discard(cache)
    end()

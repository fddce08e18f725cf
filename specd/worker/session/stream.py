"""The server's end of a session: one bidirectional stream, one cache, and the latest request on it."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

import grpc
import mlx.core as mx
import structlog

from specd.errors import InvalidRequestError, SpecdError, StartupError, to_status
from specd.protocol import PROTOCOL
from specd.rpc.deferred import Deferred
from specd.rpc.messages import INCARNATION, sampling_from, to_cache_parts, to_model
from specd.sampling import Sampling
from specd.step_costs import StepCosts
from specd.v1 import model_pb2, sampling_pb2
from specd.version import __version__
from specd.worker.engine.engine import Engine
from specd.worker.engine.jobs import Done, Steps
from specd.worker.engine.prefill_chunk import PrefillChunk
from specd.worker.model.loader import LoadedModel
from specd.worker.sampling.sampler import Sampler
from specd.worker.session.capacity import CacheCapacity
from specd.worker.session.grammar_masks import GrammarMasks, SessionMasks
from specd.worker.session.metrics import WorkerMetrics
from specd.worker.session.prefix_cache import PrefixCache
from specd.worker.session.self_draft import SelfDraft, SessionDrafter
from specd.worker.session.session_cache import SessionCache, free_on_error
from specd.worker.session.validation import check_adapter, check_namespace, check_source

log = structlog.get_logger()


@dataclass(frozen=True)
class Worker:
    """A loaded model, its engine, the caches of its sessions, and the prefix cache.

    `fingerprint` digests all bytes of the model; it is "" if they cannot be read. `logit_rounding` is measured at the
    calibration, for near ties, and `adapter_roundings` are the same of the model with each of its adapters. A target
    may have a draft of its own, `self_draft`. `incarnation` is a random id of this life of the process, in `Describe`
    and in the initial metadata of each stream.
    """

    engine: Engine
    model: LoadedModel
    caches: CacheCapacity
    prefixes: PrefixCache
    metrics: WorkerMetrics
    chunk: PrefillChunk
    costs: StepCosts
    runs_ahead: bool = False  # whether a target computes while an answer travels
    whole_fingerprint: Future[str] = field(default_factory=Future)
    logit_rounding: float = 0.0
    adapter_roundings: Mapping[str, float] = field(default_factory=dict)
    self_draft: SelfDraft | None = None
    incarnation: str = field(default_factory=lambda: secrets.token_hex(16))
    grammar_masks: GrammarMasks = field(init=False)
    description: model_pb2.DescribeResponse = field(init=False)  # only the constant fields
    tokenizer_config: model_pb2.TokenizerConfig = field(init=False)

    def __post_init__(self) -> None:
        """Create the description of the model. Raises StartupError for values that a message cannot hold."""
        footprint = self.caches.footprint
        try:
            description = model_pb2.DescribeResponse(
                model=to_model(self.model.info),
                incarnation=self.incarnation,
                cache_capacity_bytes=self.caches.capacity_bytes,
                cache_parts=to_cache_parts(footprint),
                bytes_per_source_token=footprint.bytes_per_source_token,
                logit_rounding=self.logit_rounding,
                kernel_class=f"{self.model.info.device}, {self.model.info.precision}, mlx {version('mlx')}",
                prefix_cache_bytes=self.prefixes.budget_bytes,
                multiplexes=True,
                version=__version__,
                protocol=PROTOCOL,
            )
            if self.self_draft is not None:
                description.self_draft.model.CopyFrom(to_model(self.self_draft.info))
            tokenizer_config = model_pb2.TokenizerConfig(**dataclasses.asdict(self.model.tokenizer_config))
        except (ValueError, TypeError) as error:
            raise StartupError(
                f"the model {self.model.info.name} cannot be described to other processes ({error}): "
                "correct its config.json or tokenizer_config.json"
            ) from error
        object.__setattr__(self, "description", description)  # the dataclass is frozen
        object.__setattr__(self, "grammar_masks", GrammarMasks(self.model, self._observe_masks))
        object.__setattr__(self, "tokenizer_config", tokenizer_config)

    def rounding_of(self, cache: SessionCache) -> float:
        """Return the rounding of the logits of a session's model."""
        return self.adapter_roundings.get(cache.adapter, self.logit_rounding)

    def _observe_masks(self, seconds: float) -> None:
        self.metrics.mask_seconds.observe(seconds)


@dataclass
class WorkerSession:
    """The session's KV cache and its sampler, and what proposes tokens where the target drafts itself.

    With a grammar it has the masks of its tokens.
    """

    cache: SessionCache
    sampler: Sampler
    drafter: SessionDrafter | None = None
    masks: SessionMasks | None = None

    @property
    def caches(self) -> list[SessionCache]:
        """All caches of the session."""
        return [self.cache, *(self.drafter.caches if self.drafter is not None else [])]


class _Request(Protocol):
    @property
    def round(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def source_token_ids(self) -> Sequence[int]: ...
    @property
    def namespace(self) -> bytes: ...
    @property
    def adapter(self) -> str: ...
    @property
    def sampling(self) -> sampling_pb2.SessionSampling: ...
    def HasField(self, field_name: Literal["sampling"]) -> bool: ...  # noqa: N802


Request = TypeVar("Request", bound=_Request)
Response = TypeVar("Response")
Result = TypeVar("Result")


@dataclass(eq=False)
class _Asked(Generic[Request, Result]):
    """A request, and its running job."""

    request: Request
    computing: asyncio.Future[Done[Result]]
    first: asyncio.Future[Done[Any]]  # never done where a request has one answer


class SessionStreams(Generic[Request, Result, Response]):
    """Serves the sessions of one worker by the prefix protocol, for drafts and targets.

    `begin` checks a request and returns its steps, `answer` makes the response from their result.
    """

    def __init__(
        self,
        worker: Deferred[Worker],
        *,
        begin: Callable[[Worker, WorkerSession, Request], Steps[Result]],
        answer: Callable[[WorkerSession, Request, Done[Result]], Response],
    ) -> None:
        self._deferred = worker
        self._begin = begin
        self._answer = answer

    async def serve(self, context: grpc.aio.ServicerContext[Request, Response]) -> None:
        """Serve one session until its stream ends, then leave its cache to the prefix cache, or free it on an error."""
        session_id = dict(context.invocation_metadata() or ()).get("specd-session-id", "")
        structlog.contextvars.bind_contextvars(session_id=session_id)
        try:
            worker = self._deferred.get()
            await context.send_initial_metadata(((INCARNATION, worker.incarnation),))
            await self._serve_session(worker, context)
        except (SpecdError, ExceptionGroup) as raised:
            error = raised.exceptions[0] if isinstance(raised, ExceptionGroup) else raised
            if isinstance(error, SpecdError):
                log.warning("request refused", reason=error.reason, error=str(error))
                await context.abort_with_status(to_status(error))
            log.error("request failed", exc_info=error)
            await context.abort(grpc.StatusCode.INTERNAL, "the worker failed on this request; its log has the cause")

    async def _serve_session(self, worker: Worker, context: grpc.aio.ServicerContext[Request, Response]) -> None:
        cache = SessionCache(worker.model, worker.prefixes)
        session = WorkerSession(cache, Sampler(Sampling(), worker.model.info.vocabulary_size))
        worker.caches.add(cache)
        keeps = True
        log.debug("session opened")
        try:
            await self._serve_latest(worker, context, session)
        except Exception:
            keeps = False
            worker.metrics.requests.labels("failed").inc()
            raise
        finally:
            # On the engine's thread, because the running step may still use the cache.
            worker.engine.run_soon(partial(_close, session, worker.caches, keeps=keeps))
            log.debug("session closed")

    async def _serve_latest(
        self, worker: Worker, context: grpc.aio.ServicerContext[Request, Response], session: WorkerSession
    ) -> None:
        """Answer the latest request, and drop one that is not done when the next arrives."""
        latest: _Asked[Request, Result] | None = None
        writing = asyncio.Lock()
        try:
            async with asyncio.TaskGroup() as answers:
                while (request := cast(Any, await context.read())) is not grpc.aio.EOF:
                    if latest is not None and latest.computing.cancel():
                        worker.metrics.requests.labels("superseded").inc()
                    structlog.contextvars.bind_contextvars(request=request.round)
                    if latest is None:
                        _set_up(worker, session, request)
                    elif _has_set_up(request):
                        raise InvalidRequestError(
                            "CONTRADICTION",
                            "sampling, source_token_ids, namespace or adapter is set in a later request: set them in "
                            "the first request of a stream only",
                        )
                    steps = self._begin(worker, session, request)
                    if latest is None and session.masks is not None:
                        await session.masks.done()  # to compile a grammar can take a second, which no step may wait
                    worker.caches.reserve(session.cache, request.position + len(request.token_ids))
                    first = asyncio.get_running_loop().create_future()
                    job = free_on_error(session.cache, steps)
                    latest = _Asked(request, worker.engine.submit(job, session.cache, first=first), first)
                    answers.create_task(self._write_answers(worker, context, session, latest, writing))
                if latest is not None and latest.first.done():
                    latest.computing.cancel()  # the caller has the verdict, and has ended the session
        finally:
            # A task that was cancelled before it began has not cancelled its job.
            if latest is not None:
                latest.computing.cancel()

    async def _write_answers(
        self,
        worker: Worker,
        context: grpc.aio.ServicerContext[Request, Response],
        session: WorkerSession,
        asked: _Asked[Request, Result],
        writing: asyncio.Lock,
    ) -> None:
        """Write the answer to a request, or both of them."""
        await asyncio.wait({asked.first, asked.computing}, return_when=asyncio.FIRST_COMPLETED)
        for answer in (asked.first, asked.computing):
            if answer is asked.first and not answer.done():
                continue
            done = await answer
            async with writing:  # gRPC takes one message at a time
                await _write(context, self._answer(session, asked.request, done))
            worker.metrics.compute_seconds.observe(done.compute_seconds)
            worker.metrics.queue_seconds.observe(done.queue_seconds)
        worker.metrics.requests.labels("done").inc()


async def _write(context: grpc.aio.ServicerContext[Any, Response], response: Response) -> None:
    write = asyncio.ensure_future(context.write(response))
    try:
        await asyncio.shield(write)
    except asyncio.CancelledError:
        # gRPC loses a status during a write, and the caller would wait for it for ever.
        await asyncio.gather(write, return_exceptions=True)
        raise


def worker_time(done: Done[Any]) -> model_pb2.WorkerTime:
    """Return the message with the times of a request."""
    return model_pb2.WorkerTime(
        queue_seconds=done.queue_seconds,
        compute_seconds=done.compute_seconds,
        num_sessions=done.num_sessions,
        step_tokens=done.step_tokens,
    )


def _has_set_up(request: _Request) -> bool:
    return bool(request.HasField("sampling") or request.source_token_ids or request.namespace or request.adapter)


def _set_up(worker: Worker, session: WorkerSession, request: _Request) -> None:
    """Set up a session by its first request. Raises InvalidRequestError."""
    model = worker.model.info
    sampling = sampling_from(request.sampling) if request.HasField("sampling") else Sampling()
    vocabulary_size = min(sampling.vocabulary_size or model.vocabulary_size, model.vocabulary_size)
    sampling.check(vocabulary_size=vocabulary_size, model_name=model.name)
    check_source(model, request.source_token_ids)
    check_namespace(request.namespace)
    check_adapter(model, request.adapter)
    if request.adapter:
        session.cache.choose(request.adapter)
    session.sampler = Sampler(sampling, model.vocabulary_size)
    if worker.self_draft is not None:
        session.drafter = worker.self_draft.begin(sampling, model.vocabulary_size)
    for cache in session.caches:
        cache.source, cache.namespace = tuple(request.source_token_ids), request.namespace


def _close(session: WorkerSession, caches: CacheCapacity, *, keeps: bool) -> None:
    """End a session's caches, and leave them to the prefix caches if it `keeps` them."""
    caches.discard(session.cache)
    for cache in session.caches:
        try:
            cache.keep() if keeps else cache.free()
        except Exception:  # keeping the cache evaluates it, which can run out of memory and must not end other sessions
            log.exception("cannot keep the cache of a session")
            cache.free()
    if not len(caches):
        mx.clear_cache()  # only without sessions, because they reuse the allocator's free buffers

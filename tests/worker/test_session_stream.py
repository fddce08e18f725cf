"""The end of a session's stream: what its caller gets to know, and what it leaves in the prefix cache."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import grpc
import mlx.core as mx
import pytest
from prometheus_client import CollectorRegistry

from specd.cache_footprint import ALL_TOKENS, CacheFootprint
from specd.errors import InvalidRequestError
from specd.rpc.deferred import Deferred
from specd.sampling import Sampling
from specd.step_costs import StepCosts
from specd.v1.draft_pb2 import ProposeRequest
from specd.worker.engine.engine import Engine
from specd.worker.engine.jobs import Steps
from specd.worker.sampling.sampler import Sampler
from specd.worker.session import stream as session_stream
from specd.worker.session.capacity import CacheCapacity
from specd.worker.session.metrics import WorkerMetrics
from specd.worker.session.prefix_cache import PrefixCache
from specd.worker.session.session_cache import SessionCache
from specd.worker.session.stream import SessionStreams, Worker, WorkerSession
from tests.worker.driving import Chunks, finish
from tests.worker.models import tiny_model
from tests.worker.prefixes import CHUNK, MODEL, PLENTY, request_stepwise, stored

pytestmark = pytest.mark.usefixtures("small_sizes")

PATIENCE_SECONDS = 30.0
FOOTPRINT = CacheFootprint({ALL_TOKENS: 1})


class FakeContext:
    """The worker's end of a call whose requests the test sends."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[Any] = asyncio.Queue()
        self.answers: asyncio.Queue[Any] = asyncio.Queue()

    def invocation_metadata(self) -> None:
        return None

    async def send_initial_metadata(self, metadata: Any) -> None:
        pass

    async def answer(self) -> Any:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.answers.get()

    async def read(self) -> Any:
        request = await self.requests.get()
        if isinstance(request, BaseException):
            raise request
        return request

    async def write(self, answer: Any) -> None:
        await self.answers.put(answer)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise ConnectionAbortedError(details)

    async def abort_with_status(self, status: Any) -> None:
        raise ConnectionAbortedError(status.details)


class Streams:
    """A worker's streams, with requests that operate the cache."""

    def __init__(self, engine: Engine) -> None:
        self.prefixes = PrefixCache(PLENTY)
        caches = CacheCapacity(10**9, FOOTPRINT)
        metrics = WorkerMetrics(CollectorRegistry(), caches, self.prefixes)
        self.worker = Worker(engine, MODEL, caches, self.prefixes, metrics, CHUNK, StepCosts({1: {1: 0.01}}))
        deferred = Deferred[Worker]("the model")
        deferred.set(self.worker)
        self._streams: SessionStreams[Any, Any, Any] = SessionStreams(
            deferred, begin=self._begin, answer=lambda *_: "answer"
        )

    def open(self) -> tuple[FakeContext, asyncio.Task[None]]:
        context: Any = FakeContext()
        return context, asyncio.create_task(self._streams.serve(context))

    async def open_with_prompt(self) -> tuple[FakeContext, asyncio.Task[None]]:
        context, serving = self.open()
        await context.requests.put(ask(hold_prompt))
        await context.answer()
        return context, serving

    async def settle(self) -> list[tuple[int, ...]]:
        """Wait for the engine to close what has ended; return what is stored."""

        def nothing() -> Steps[list[tuple[int, ...]]]:
            return stored(self.prefixes)
            yield

        found = (await self.worker.engine.submit(nothing())).result
        assert not self.worker.caches
        return found

    def _begin(self, worker: Worker, session: WorkerSession, request: Any) -> Steps[None]:
        return request.begin(session.cache)


@pytest.fixture
def streams() -> Iterator[Streams]:
    engine = Engine(mx.clear_streams)
    yield Streams(engine)
    engine.stop()


def ask(begin: Callable[[SessionCache], Steps[None]]) -> Any:
    return SimpleNamespace(
        source_token_ids=(),
        namespace=b"",
        adapter="",
        round=1,
        position=0,
        token_ids=(),
        begin=begin,
        HasField=lambda name: False,
    )


def hold_prompt(cache: SessionCache) -> Steps[None]:
    return request_stepwise(cache, cache.cached_len, [1, 2, 3, 4, 5], [6])


def fail(cache: SessionCache) -> Steps[None]:
    raise FloatingPointError("not a number")
    yield


def refuse(cache: SessionCache) -> Steps[None]:
    raise InvalidRequestError("EMPTY_TOKEN_IDS", "token_ids is empty")


@pytest.mark.parametrize("end", ["closed", "cancelled"])
async def test_a_stream_that_ends_well_leaves_its_cache(streams: Streams, end: str) -> None:
    context, serving = await streams.open_with_prompt()
    if end == "closed":
        await context.requests.put(grpc.aio.EOF)
    else:
        serving.cancel()
    await asyncio.wait([serving])
    assert await streams.settle() == [(1, 2, 3, 4, 5)]


@pytest.mark.parametrize("is_first", [True, False])
async def test_an_adapter_is_one_of_the_worker_and_is_named_first(streams: Streams, is_first: bool) -> None:
    context, serving = streams.open() if is_first else await streams.open_with_prompt()
    request = ask(hold_prompt)
    request.adapter = "sql"
    await context.requests.put(request)
    with pytest.raises(ConnectionAbortedError, match="no adapters" if is_first else "adapter is set in a later"):
        await serving
    assert await streams.settle() == []


@pytest.mark.parametrize("failing", [fail, refuse])
async def test_a_stream_that_fails_leaves_nothing(streams: Streams, failing: Callable[..., Steps[None]]) -> None:
    context, serving = await streams.open_with_prompt()
    await context.requests.put(ask(failing))
    with pytest.raises(ConnectionAbortedError):
        await serving
    assert await streams.settle() == []


@pytest.mark.parametrize("fails", [True, False])
async def test_a_stream_that_is_cancelled_during_a_step_leaves_what_is_sound(streams: Streams, fails: bool) -> None:
    started, go_on = threading.Event(), threading.Event()

    def wait(cache: SessionCache) -> Steps[None]:
        yield from cache.feed(mx.array([9, 9]))
        started.set()
        go_on.wait()
        if fails:
            raise FloatingPointError("not a number")
        yield from cache.feed(mx.array([9, 9]))

    context, serving = await streams.open_with_prompt()
    await context.requests.put(ask(wait))
    await asyncio.to_thread(started.wait)
    serving.cancel()
    await asyncio.wait([serving])
    go_on.set()
    assert await streams.settle() == ([] if fails else [(1, 2, 3, 4, 5)])


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_job_that_waits_when_its_stream_ends_never_begins(streams: Streams, at_once: bool) -> None:
    go_on, began = threading.Event(), threading.Event()

    def hold_up() -> Steps[None]:
        go_on.wait()
        return
        yield

    def begin(cache: SessionCache) -> Steps[None]:
        began.set()
        yield from cache.feed(mx.array([9, 9]))

    holding = streams.worker.engine.submit(hold_up())
    context, serving = streams.open()
    await context.requests.put(ask(begin))
    if at_once:  # the task that is to wait for the job has not begun then
        await context.requests.put(asyncio.CancelledError())
    else:
        while not context.requests.empty():  # noqa: ASYNC110
            await asyncio.sleep(0)
        serving.cancel()
    await asyncio.wait([serving])
    go_on.set()
    await holding
    await streams.settle()
    assert not began.is_set()


async def test_nothing_goes_on_from_a_superseded_request_that_failed(streams: Streams) -> None:
    started, go_on = threading.Event(), threading.Event()

    def fail_late(cache: SessionCache) -> Steps[None]:
        started.set()
        go_on.wait()
        raise FloatingPointError("not a number")
        yield

    held: list[int] = []

    def look(cache: SessionCache) -> Steps[None]:
        held.append(cache.cached_len)
        return
        yield

    context, serving = await streams.open_with_prompt()
    await context.requests.put(ask(fail_late))
    await asyncio.to_thread(started.wait)
    await context.requests.put(ask(look))
    while not context.requests.empty():  # noqa: ASYNC110
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    go_on.set()
    await context.answer()
    assert held == [0]
    await context.requests.put(grpc.aio.EOF)
    await serving
    assert await streams.settle() == []


def session_of(cache: SessionCache) -> WorkerSession:
    return WorkerSession(cache, Sampler(Sampling(), MODEL.info.vocabulary_size))


def test_the_end_of_a_session_leaves_others_the_free_buffers_of_the_allocator() -> None:
    caches = CacheCapacity(1000, FOOTPRINT)
    one, other = SessionCache(MODEL), SessionCache(MODEL)
    for cache in (one, other):
        caches.add(cache)
        finish(cache.feed(mx.zeros(300, mx.uint32)))
    mx.eval(mx.ones(1000) + 1)
    session_stream._close(session_of(one), caches, keeps=True)
    assert mx.get_cache_memory() > 0
    session_stream._close(session_of(other), caches, keeps=True)
    assert mx.get_cache_memory() == 0


async def test_a_status_waits_for_the_answer_that_is_being_sent() -> None:
    """gRPC refuses to send a status during a write, and the caller would wait for one for ever."""

    def begin(worker: object, session: object, request: ProposeRequest) -> Steps[None]:
        if not request.token_ids:
            raise InvalidRequestError("EMPTY_TOKEN_IDS", "empty")
        return nothing()

    def nothing() -> Steps[None]:
        return
        yield

    class Context:
        """The server's end of a call whose client takes its time."""

        def __init__(self) -> None:
            self.requests = [ProposeRequest(token_ids=[5]), ProposeRequest()]
            self.is_sending = False
            self.sending = asyncio.Event()
            self.status: grpc.Status | None = None

        def invocation_metadata(self) -> tuple[()]:
            return ()

        async def send_initial_metadata(self, metadata: object) -> None:
            pass

        async def read(self) -> ProposeRequest:
            if len(self.requests) == 1:
                await self.sending.wait()
            return self.requests.pop(0)

        async def write(self, answer: object) -> None:
            self.is_sending = True
            self.sending.set()
            for _ in range(10):
                await asyncio.sleep(0)
            self.is_sending = False

        async def abort_with_status(self, status: grpc.Status) -> None:
            assert not self.is_sending
            self.status = status
            raise grpc.aio.AbortError

    worker = Deferred[Worker]("the model")
    engine, prefixes, caches = Engine(mx.clear_streams), PrefixCache(0), CacheCapacity(10**9, FOOTPRINT)
    metrics = WorkerMetrics(CollectorRegistry(), caches, prefixes)
    costs = StepCosts({1: {1: 0.01}})
    worker.set(Worker(engine, tiny_model(), caches, prefixes, metrics, chunk=Chunks(512), costs=costs))
    streams = SessionStreams[ProposeRequest, None, None](worker, begin=begin, answer=lambda *_: None)
    context = Context()
    with pytest.raises(grpc.aio.AbortError):
        await streams.serve(cast(Any, context))
    engine.stop()
    assert context.status is not None
    assert context.status.code is grpc.StatusCode.INVALID_ARGUMENT

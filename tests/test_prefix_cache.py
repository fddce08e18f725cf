"""What ended sessions leave: found by the longest prefix, never changed by those that take it over, never too large."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache
from prometheus_client import CollectorRegistry

from specd.deferred import Deferred
from specd.errors import InvalidRequestError
from specd.step_costs import StepCosts
from specd.worker import prefix_cache, session_cache
from specd.worker.engine import Engine, Steps
from specd.worker.live_caches import LiveCaches
from specd.worker.metrics import WorkerMetrics
from specd.worker.prefix_cache import PrefixCache
from specd.worker.session import WorkerSession
from specd.worker.session_cache import SessionCache
from specd.worker.session_stream import SessionStreams
from specd.worker.worker import Worker
from tests.driving import Chunks, Driven, feed_now, finish, run_some
from tests.models import tiny_model

MODEL = tiny_model()
BLOCK = 4  # tokens by which a buffer grows
MAX_LOST = 3
BLOCK_BYTES = 1024  # of the tiny model: 2 layers of keys and values, 2 heads of 8 floats, 4 tokens
PLENTY = 2**30
CHUNK = Chunks(3)
PATIENCE_SECONDS = 30.0


@pytest.fixture(autouse=True, scope="module")
def small_sizes() -> Iterator[None]:
    """Make buffers grow, prefills take steps and entries be moved or copied with a few tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "step", BLOCK)
        patch.setattr(prefix_cache, "_MAX_LOST", MAX_LOST)
        patch.setattr(session_cache, "MAX_PENDING", 2)
        yield


def fresh_logits(token_ids: Sequence[int]) -> np.ndarray:
    return np.array(MODEL.network(mx.array([token_ids]))[0])


def request(cache: SessionCache, position: int, token_ids: Sequence[int], proposal: Sequence[int] = ()) -> None:
    """Verify a proposal, and check the logits against those without any cache."""
    session = [*cache.token_ids[:position], *token_ids]
    fed = [*finish(cache.prefill(position, token_ids, CHUNK)), *proposal]
    assert cache.token_ids == session[: len(session) + len(proposal) - len(fed)]
    logits = np.array(feed_now(cache, fed))
    cache.commit(fed)
    assert cache.token_ids == [*session, *proposal]
    np.testing.assert_allclose(logits, fresh_logits(cache.token_ids)[-len(fed) :], atol=0.02)  # of about 10


def request_stepwise(
    cache: SessionCache, position: int, token_ids: Sequence[int], drafted: Sequence[int]
) -> Steps[None]:
    """Propose, the tokens being given; a step for each."""
    latest = yield from cache.prefill(position, token_ids, CHUNK)
    pending = latest
    for token_id in drafted:
        mx.async_eval((yield from cache.feed(mx.array(latest))))
        latest = [token_id]
    if drafted:
        cache.commit([*pending, *drafted[:-1]])


def session(prefixes: PrefixCache | None, token_ids: Sequence[int]) -> SessionCache:
    """Begin a session."""
    cache = SessionCache(MODEL, prefixes)
    request(cache, 0, token_ids)
    return cache


def leave(prefixes: PrefixCache, token_ids: Sequence[int]) -> None:
    """Hold a whole session."""
    session(prefixes, token_ids).keep()


def stored(prefixes: PrefixCache) -> list[tuple[int, ...]]:
    return [entry.token_ids for entry in prefixes._entries]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


def contents(layers: list[Any]) -> list[np.ndarray]:
    return [np.array(array) for layer in layers for array in (layer.keys, layer.values)]


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(x.shape == y.shape and (x == y).all() for x, y in zip(a, b, strict=True))


class Watch:
    """Looks after every change whether the prefix cache is as it says, and its entries as they came."""

    def __init__(self, prefixes: PrefixCache, budget_bytes: int) -> None:
        self._prefixes, self._budget_bytes = prefixes, budget_bytes
        self._seen: dict[Any, list[np.ndarray]] = {}

    def look(self) -> None:
        entries = self._prefixes._entries
        tokens = stored(self._prefixes)
        assert tokens == sorted(tokens)
        assert not any(a == b[: len(a)] for a in tokens for b in tokens if a is not b)
        held = sum(array.nbytes for entry in entries for layer in entry.layers for array in (layer.keys, layer.values))
        assert held == self._prefixes.nbytes <= self._budget_bytes
        for entry in entries:
            assert {layer.offset for layer in entry.layers} == {len(entry.token_ids)}
            assert same(self._seen.setdefault(entry, contents(entry.layers)), contents(entry.layers))


def token_lists(min_size: int, max_size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 2), min_size=min_size, max_size=max_size)


@given(st.data())
def test_sessions_that_take_over_what_others_left_equal_fresh_ones(data: st.DataObject) -> None:
    budget_bytes = data.draw(st.integers(0, 14)) * BLOCK_BYTES
    prefixes = PrefixCache(budget_bytes)
    watch = Watch(prefixes, budget_bytes)
    streams: list[SessionCache] = []
    num_reused = 0
    for _ in range(data.draw(st.integers(1, 20))):
        what = data.draw(st.sampled_from(["open", "verify", "propose", "supersede", "keep", "fail"]))
        if what == "open" or not streams:
            cache = SessionCache(MODEL, prefixes)
            streams.append(cache)
            # Half of the time it goes on with, or turns off from, what another one left.
            prompt = data.draw(token_lists(1, 12))
            if prefixes.num_entries and data.draw(st.booleans()):
                known = data.draw(st.sampled_from(stored(prefixes)))
                prompt = [*known[: data.draw(st.integers(0, len(known)))], *prompt]
            expected = max((common(entry, prompt[:-1]) for entry in stored(prefixes)), default=0)
            assert cache.reused_len == 0
            if data.draw(st.booleans()):
                request(cache, 0, prompt, data.draw(token_lists(0, 4)))
            else:
                run_some(request_stepwise(cache, 0, prompt, [1, 2]), data.draw(st.integers(1, 5)))
            assert cache.reused_len == expected
            num_reused += expected
        else:
            cache = data.draw(st.sampled_from(streams))
            # The first request of a stream that holds nothing, once more, would take over again.
            position = data.draw(st.integers(min(1, cache.cached_len), cache.cached_len))
            before = cache.reused_len
            match what:
                case "verify":
                    request(cache, position, data.draw(token_lists(1, 8)), data.draw(token_lists(0, 4)))
                case "propose":
                    token_ids, drafted = data.draw(token_lists(1, 8)), data.draw(token_lists(0, 4))
                    finish(request_stepwise(cache, position, token_ids, drafted))
                case "supersede":
                    token_ids, drafted = data.draw(token_lists(1, 8)), data.draw(token_lists(0, 4))
                    run_some(request_stepwise(cache, position, token_ids, drafted), data.draw(st.integers(0, 5)))
                case "keep":
                    cache.keep()
                    streams.remove(cache)
                case "fail":
                    known = stored(prefixes)
                    cache.free()
                    streams.remove(cache)
                    assert stored(prefixes) == known
            num_reused += cache.reused_len if cache.reused_len != before else 0
        watch.look()
    assert prefixes.num_reused_tokens >= num_reused
    for cache in streams:  # they still hold what they should
        request(cache, cache.cached_len, [1, 0])


def layer_of(token_ids: Sequence[int]) -> KVCache:
    """Make a layer whose keys are the tokens."""
    layer = KVCache()
    keys = mx.array(token_ids, mx.float32).reshape(1, 1, -1, 1)
    layer.update_and_fetch(keys, -keys)
    return layer


@given(st.lists(token_lists(1, 10), max_size=12), st.lists(token_lists(0, 10), max_size=6))
def test_the_longest_prefix_is_found_among_all(entries: list[list[int]], queries: list[list[int]]) -> None:
    prefixes = PrefixCache(PLENTY)
    for entry in entries:
        prefixes.store(entry, [layer_of(entry)])
        assert tuple(entry) in {tokens[: len(entry)] for tokens in stored(prefixes)}
    watch = Watch(prefixes, PLENTY)
    for query in queries:
        watch.look()
        known = stored(prefixes)
        expected = max((common(entry, query) for entry in known), default=0)
        layers, reused_len = prefixes.take(query)
        assert reused_len == expected
        assert bool(layers) == bool(expected)
        for layer in layers:
            keys, values = layer.keys_and_values()
            assert keys[0, 0, :, 0].tolist() == query[:reused_len]
            assert values[0, 0, :, 0].tolist() == [-token_id for token_id in query[:reused_len]]
        # What is gone is at most one, and had next to nothing more.
        gone = set(known) - set(stored(prefixes))
        assert len(gone) <= 1
        assert all(len(tokens) - reused_len <= MAX_LOST for tokens in gone)


def test_what_goes_on_moves_and_what_branches_off_is_copied() -> None:
    prefixes = PrefixCache(PLENTY)
    leave(prefixes, range(12))
    [entry] = prefixes._entries
    branching = session(prefixes, [0, 1, 2, 3, 9])
    assert branching.reused_len == 4
    assert prefixes._entries == [entry]
    going_on = session(prefixes, [*range(12 - MAX_LOST), 15, 15])
    assert going_on.reused_len == 12 - MAX_LOST
    assert going_on.layers is entry.layers
    assert prefixes.num_entries == prefixes.nbytes == 0
    assert prefixes.num_reused_tokens == 4 + 12 - MAX_LOST


@pytest.mark.parametrize("first", ["sharer", "mover"])
@pytest.mark.parametrize("length", [4, 6, 8, 9])  # at the end of a block, and within one
def test_neither_of_two_that_took_over_the_same_sees_the_other(first: str, length: int) -> None:
    prefixes = PrefixCache(PLENTY)
    leave(prefixes, range(13))
    [entry] = prefixes._entries
    before = contents(entry.layers)
    sharer = SessionCache(MODEL, prefixes)
    pending = finish(sharer.prefill(0, range(length + 1), CHUNK))
    assert (pending, sharer.reused_len) == ([length], length)
    assert same(contents(entry.layers), before)

    def share() -> None:
        for position in (length, length, length + 3):
            request(sharer, position, [7, 7, 7, 7])

    def move() -> None:
        mover = SessionCache(MODEL, prefixes)
        request(mover, 0, [*range(12), 5, 5])
        assert mover.reused_len == 12
        for position in (14, 2, 4):
            request(mover, position, [6] * 9)

    if first == "sharer":
        share()
        assert same(contents(entry.layers), before)
        move()
    else:
        held = [array[..., :length, :] for array in contents(sharer.layers)]
        move()
        assert same([array[..., :length, :] for array in contents(sharer.layers)], held)
        share()
    request(sharer, length, [8, 8])


def test_a_copy_is_no_larger_than_what_it_copies() -> None:
    prefixes = PrefixCache(PLENTY)
    leave(prefixes, [index % 10 for index in range(400)])
    copied = SessionCache(MODEL, prefixes)
    finish(copied.prefill(0, [0, 1, 2, 3, 4, 5, 15], CHUNK))
    assert copied.reused_len == 6
    assert sum(layer.nbytes for layer in copied.layers) == 2 * BLOCK_BYTES


def test_the_last_token_is_never_taken_over() -> None:
    prefixes = PrefixCache(PLENTY)
    leave(prefixes, [1, 2, 3, 4])
    again = SessionCache(MODEL, prefixes)
    assert finish(again.prefill(0, [1, 2, 3, 4], CHUNK)) == [4]
    assert again.reused_len == again.cached_len == 3
    again.keep()
    assert session(prefixes, [1]).reused_len == 0


def test_a_prefix_of_an_entry_is_not_stored_and_one_that_an_entry_is_a_prefix_of_takes_its_place() -> None:
    prefixes = PrefixCache(PLENTY)
    for token_ids in ([1, 2, 3], [1, 3], [1, 2, 4]):
        prefixes.store(token_ids, [layer_of(token_ids)])
    prefixes.store([1, 2], [layer_of([1, 2])])
    prefixes.store([1, 2, 3], [layer_of([1, 2, 3])])
    assert stored(prefixes) == [(1, 2, 3), (1, 2, 4), (1, 3)]
    prefixes.store([1, 2, 3, 0], [layer_of([1, 2, 3, 0])])
    assert stored(prefixes) == [(1, 2, 3, 0), (1, 2, 4), (1, 3)]
    assert prefixes.num_evictions == 0


def test_the_least_recently_used_goes_first() -> None:
    one = layer_of([0]).nbytes
    prefixes = PrefixCache(6 * one)
    long = [0, 0, 0, 0, 0, 0, 0, 0]  # two blocks
    for token_ids in ([1], long, [2], [3]):
        prefixes.store(token_ids, [layer_of(token_ids)])
    prefixes.store([1], [layer_of([1])])  # it is there: now used last but one
    prefixes.take([0, 0, 9])  # a copy
    prefixes.store([4], [layer_of([4])])
    assert (prefixes.nbytes, prefixes.num_evictions) == (6 * one, 0)

    prefixes.store([5], [layer_of([5])])
    assert stored(prefixes) == [tuple(long), (1,), (3,), (4,), (5,)]
    prefixes.store([6] * 8, [layer_of([6] * 8)])
    assert stored(prefixes) == [tuple(long), (4,), (5,), (6,) * 8]
    assert (prefixes.nbytes, prefixes.num_evictions) == (6 * one, 3)
    prefixes.store([7] * 100, [layer_of([7] * 100)])  # would never fit
    assert stored(prefixes) == [tuple(long), (4,), (5,), (6,) * 8]


def test_without_a_budget_nothing_is_kept() -> None:
    prefixes = PrefixCache(0)
    leave(prefixes, range(12))
    assert session(prefixes, range(13)).reused_len == 0
    assert prefixes.num_entries == prefixes.nbytes == prefixes.num_evictions == 0


def test_memory_stays_within_the_budget() -> None:
    budget_bytes = 64 * BLOCK_BYTES
    prefixes = PrefixCache(budget_bytes)
    mx.clear_cache()
    before = mx.get_active_memory()
    for number in range(500):
        digits = [number // 10**place % 10 for place in range(3)]
        cache = SessionCache(MODEL, prefixes)
        pending = finish(cache.prefill(0, [*digits, *range(number % 20), 1], CHUNK))
        mx.eval(feed_now(cache, pending))
        cache.commit(pending)
        cache.keep()
        assert prefixes.nbytes <= budget_bytes
        assert mx.get_active_memory() - before <= budget_bytes + 16 * BLOCK_BYTES
        assert mx.get_cache_memory() == 0
    assert prefixes.nbytes > budget_bytes // 2
    assert prefixes.num_evictions > 400


@pytest.mark.parametrize("after_steps", range(1, 8))
def test_a_job_that_outlives_its_session_changes_nothing(after_steps: int) -> None:
    prefixes = PrefixCache(PLENTY)
    cache = session(prefixes, [1, 2, 3, 4, 5])
    driven = Driven(request_stepwise(cache, 3, [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7], [6, 6, 6]))
    for _ in range(after_steps):
        driven.step()
    token_ids = tuple(cache.token_ids)
    cache.keep()
    assert stored(prefixes) == [token_ids]
    watch = Watch(prefixes, PLENTY)
    watch.look()
    with contextlib.suppress(AssertionError):  # it would have been closed
        while not driven.has_ended:
            driven.step()
    watch.look()
    request(SessionCache(MODEL, prefixes), 0, [*token_ids, 1])


def test_the_metrics_say_what_it_holds_and_gave() -> None:
    prefixes = PrefixCache(4 * BLOCK_BYTES)
    registry = CollectorRegistry()
    WorkerMetrics(registry, LiveCaches(1), prefixes, bytes_per_token=1)
    leave(prefixes, [1, 2, 3, 4, 5])
    session(prefixes, [1, 9]).keep()
    leave(prefixes, [2, 2, 2, 2, 2, 2, 2])
    assert [
        registry.get_sample_value(f"specd_worker_{name}")
        for name in (
            "prefix_cache_bytes",
            "prefix_cache_entries",
            "reused_tokens_total",
            "prefix_cache_evictions_total",
        )
    ] == [prefixes.nbytes, 2, 1, 1]


# -- Streams


class FakeContext:
    """The worker's end of a call whose requests the test sends."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[Any] = asyncio.Queue()
        self.answers: asyncio.Queue[Any] = asyncio.Queue()

    def invocation_metadata(self) -> None:
        return None

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
    """A worker's streams, whose requests say what to do with the cache."""

    def __init__(self, engine: Engine) -> None:
        self.prefixes = PrefixCache(PLENTY)
        caches = LiveCaches(10**9)
        metrics = WorkerMetrics(CollectorRegistry(), caches, self.prefixes, bytes_per_token=1)
        self.worker = Worker(engine, MODEL, caches, self.prefixes, metrics, CHUNK, StepCosts({1: {1: 0.01}}))
        deferred = Deferred[Worker]("the model")
        deferred.set(self.worker)
        self._streams: SessionStreams[WorkerSession, Any, Any, Any] = SessionStreams(
            deferred, new_session=WorkerSession, begin=self._begin, answer=lambda *_: "answer"
        )

    def open(self) -> tuple[FakeContext, asyncio.Task[None]]:
        context: Any = FakeContext()
        return context, asyncio.create_task(self._streams.serve(context))

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
    return SimpleNamespace(round=1, position=0, token_ids=(), begin=begin, HasField=lambda name: False)


def hold_prompt(cache: SessionCache) -> Steps[None]:
    return request_stepwise(cache, cache.cached_len, [1, 2, 3, 4, 5], [6])


def fail(cache: SessionCache) -> Steps[None]:
    raise FloatingPointError("not a number")
    yield


def refuse(cache: SessionCache) -> Steps[None]:
    raise InvalidRequestError("EMPTY_TOKEN_IDS", "token_ids is empty")


@pytest.mark.parametrize("end", ["closed", "cancelled"])
async def test_a_stream_that_ends_well_leaves_its_cache(streams: Streams, end: str) -> None:
    context, serving = streams.open()
    await context.requests.put(ask(hold_prompt))
    await context.answer()
    if end == "closed":
        await context.requests.put(grpc.aio.EOF)
    else:
        serving.cancel()
    await asyncio.wait([serving])
    assert await streams.settle() == [(1, 2, 3, 4, 5)]


@pytest.mark.parametrize("failing", [fail, refuse])
async def test_a_stream_that_fails_leaves_nothing(streams: Streams, failing: Callable[..., Steps[None]]) -> None:
    context, serving = streams.open()
    await context.requests.put(ask(hold_prompt))
    await context.answer()
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

    context, serving = streams.open()
    await context.requests.put(ask(hold_prompt))
    await context.answer()
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

    context, serving = streams.open()
    await context.requests.put(ask(hold_prompt))
    await context.answer()
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

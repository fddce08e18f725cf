"""A worker frees memory in order while it is short, and accepts sessions again afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from specd.cache_footprint import ALL_TOKENS, CacheFootprint
from specd.errors import ResourceExhaustedError
from specd.worker.engine.engine import Engine
from specd.worker.engine.jobs import Steps
from specd.worker.session.capacity import CacheCapacity
from specd.worker.session.memory_watch import MemoryWatch
from specd.worker.session.prefix_cache import PrefixCache
from specd.worker.session.session_cache import SessionCache
from tests.worker.prefixes import BLOCK_BYTES, MODEL, PLENTY, leave

pytestmark = pytest.mark.usefixtures("small_sizes")

RESERVE = 10 * BLOCK_BYTES


class Worker:
    """The parts of a worker that hold memory, on a machine that has as much of it as a test says."""

    def __init__(self, engine: Engine) -> None:
        self.available = RESERVE
        self.prefixes = PrefixCache(PLENTY)
        self.of_draft = PrefixCache(PLENTY)  # of a draft in the target
        self.caches = CacheCapacity(PLENTY, CacheFootprint({ALL_TOKENS: 1}))
        self.watch = MemoryWatch(
            engine, self.caches, [self.of_draft, self.prefixes], reserve_bytes=RESERVE, available=lambda: self.available
        )
        self._engine = engine

    async def look(self, available: int) -> None:
        """Check, and wait until memory is freed."""
        self.available = available
        self.watch.look()
        await self._run(lambda: None)

    async def leave(self, *tokens: int) -> None:
        """Let a session end that had these tokens."""
        await self._run(lambda: leave(self.prefixes, tokens))

    async def leave_draft(self, *tokens: int) -> None:
        """Let the draft's cache of these tokens stay."""
        await self._run(lambda: leave(self.of_draft, tokens))

    def begin(self, num_tokens: int) -> SessionCache:
        """Begin a session."""
        cache = SessionCache(MODEL)
        self.caches.add(cache)
        try:
            self.caches.reserve(cache, num_tokens)
        except ResourceExhaustedError:
            self.caches.discard(cache)
            raise
        return cache

    async def _run(self, action: object) -> None:
        def steps() -> Steps[None]:
            assert callable(action)
            action()
            return
            yield

        await self._engine.submit(steps())


@pytest.fixture
def worker() -> Iterator[Worker]:
    engine = Engine(mx.clear_streams)
    yield Worker(engine)
    engine.stop()


async def test_nothing_is_given_up_while_the_reserve_is_whole(worker: Worker) -> None:
    await worker.leave(1, 2, 3)
    worker.begin(5)
    await worker.look(RESERVE)
    assert worker.prefixes.num_entries == 1
    worker.begin(5)


async def test_prefixes_go_first_and_no_more_than_are_needed(worker: Worker) -> None:
    for token in range(1, 5):
        await worker.leave(token, 7, 7)
    before = worker.prefixes.nbytes
    await worker.look(RESERVE - 1)
    assert worker.prefixes.num_entries == 3
    await worker.look(RESERVE - before // 2)
    assert worker.prefixes.num_entries == 1
    worker.begin(5)
    await worker.look(0)
    assert worker.prefixes.num_entries == 0


async def test_a_drafts_prefixes_go_before_the_targets(worker: Worker) -> None:
    for token in range(1, 4):
        await worker.leave(token, 7, 7)
        await worker.leave_draft(token, 7, 7)
    all_of_draft = worker.of_draft.nbytes
    await worker.look(RESERVE - 1)
    assert (worker.of_draft.num_entries, worker.prefixes.num_entries) == (2, 3)
    await worker.look(RESERVE - all_of_draft)
    assert (worker.of_draft.num_entries, worker.prefixes.num_entries) == (0, 2)
    worker.begin(5)
    await worker.leave_draft(1, 7, 7)
    await worker.look(RESERVE - worker.of_draft.nbytes - worker.prefixes.nbytes)
    assert (worker.of_draft.num_entries, worker.prefixes.num_entries) == (0, 0)
    worker.begin(5)


async def test_then_no_session_begins_and_those_that_run_go_on(worker: Worker) -> None:
    running = worker.begin(5)
    await worker.look(RESERVE - 1)
    with pytest.raises(ResourceExhaustedError, match="short of memory") as refused:
        worker.begin(1)
    assert refused.value.reason == "CACHE_FULL"
    await worker.look(RESERVE - 1)
    worker.caches.reserve(running, 50)
    await worker.look(RESERVE)
    worker.begin(1)


async def test_prefixes_that_others_leave_meanwhile_put_nothing_off(worker: Worker) -> None:
    """They are given up at each look, and are not enough."""
    for token in range(1, 4):
        await worker.leave(token, 7, 7)
        await worker.look(0)
        assert worker.prefixes.num_entries == 0
        with pytest.raises(ResourceExhaustedError):
            worker.begin(1)


async def test_at_last_the_largest_session_is_given_up_one_at_each_look(worker: Worker) -> None:
    small, large, larger = (worker.begin(size) for size in (5, 20, 21))
    await worker.look(0)
    worker.caches.reserve(larger, 22)
    await worker.look(0)
    with pytest.raises(ResourceExhaustedError, match="short of memory"):
        worker.caches.reserve(larger, 23)
    worker.caches.reserve(large, 21)
    await worker.look(0)
    with pytest.raises(ResourceExhaustedError):
        worker.caches.reserve(large, 22)
    worker.caches.discard(larger)
    worker.caches.discard(large)
    await worker.look(RESERVE)
    worker.caches.reserve(small, 6)
    assert list(worker.caches) == [small]


async def test_a_session_that_was_given_up_stays_so_when_there_is_memory_again(worker: Worker) -> None:
    """It is on its way out: its coordinator would have to be told twice."""
    cache = worker.begin(5)
    await worker.look(0)
    await worker.look(0)
    await worker.look(RESERVE)
    with pytest.raises(ResourceExhaustedError):
        worker.caches.reserve(cache, 6)


async def test_a_session_may_end_while_the_largest_is_looked_for(worker: Worker) -> None:
    """As the engine's thread discards it, in the middle of the look."""
    ending, large = worker.begin(5), worker.begin(20)
    worker.begin(6)

    class GivenUp(set[SessionCache]):
        def __contains__(self, cache: object) -> bool:
            worker.caches.discard(ending)
            return super().__contains__(cache)

    worker.caches._given_up = GivenUp()
    assert worker.caches.give_up_largest()
    assert {*worker.caches._given_up} == {large}

"""Caches of ended sessions: found by the longest prefix, never changed by sessions that use them, never too large."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache
from prometheus_client import CollectorRegistry

from specd.cache_footprint import CacheFootprint
from specd.errors import CacheTooShortError
from specd.sampling import Sampling
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.sampling.sampler import Sampler
from specd.worker.session.capacity import CacheCapacity
from specd.worker.session.metrics import WorkerMetrics
from specd.worker.session.prefix_cache import PrefixCache
from specd.worker.session.session_cache import SessionCache
from target_worker.verification import verify
from tests.worker.driving import Chunks, Driven, feed_now, finish, run_some
from tests.worker.models import TINY_VOCABULARY_SIZE
from tests.worker.prefixes import (
    BLOCK_BYTES,
    CHUNK,
    MAX_LOST,
    MODEL,
    PLENTY,
    Watch,
    contents,
    layers_of,
    leave,
    request,
    request_stepwise,
    same,
    session,
    stored,
    token_lists,
)

pytestmark = pytest.mark.usefixtures("small_sizes")


def common(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


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
            # Half of the time it continues, or branches off from, the tokens of an earlier one.
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
                    before_free = stored(prefixes)
                    cache.free()
                    streams.remove(cache)
                    assert stored(prefixes) == before_free
            num_reused += cache.reused_len if cache.reused_len != before else 0
        watch.look()
    assert prefixes.num_reused_tokens >= num_reused
    for cache in streams:  # they still hold what they should
        request(cache, cache.cached_len, [1, 0])


@given(st.lists(token_lists(1, 10), max_size=12), st.lists(token_lists(0, 10), max_size=6))
def test_the_longest_prefix_is_found_among_all(entries: list[list[int]], queries: list[list[int]]) -> None:
    prefixes = PrefixCache(PLENTY)
    for entry in entries:
        prefixes.store(entry, layers_of(entry))
        assert tuple(entry) in {tokens[: len(entry)] for tokens in stored(prefixes)}
    watch = Watch(prefixes, PLENTY)
    for query in queries:
        watch.look()
        known = stored(prefixes)
        expected = max((common(entry, query) for entry in known), default=0)
        layers = prefixes.take(query)
        reused_len = layers.num_fed if layers is not None else 0
        assert reused_len == expected
        if layers is not None:
            keys, values = layers.last_rows
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
    assert copied.layers.nbytes == 2 * BLOCK_BYTES


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
        prefixes.store(token_ids, layers_of(token_ids))
    prefixes.store([1, 2], layers_of([1, 2]))
    prefixes.store([1, 2, 3], layers_of([1, 2, 3]))
    assert stored(prefixes) == [(1, 2, 3), (1, 2, 4), (1, 3)]
    prefixes.store([1, 2, 3, 0], layers_of([1, 2, 3, 0]))
    assert stored(prefixes) == [(1, 2, 3, 0), (1, 2, 4), (1, 3)]
    assert prefixes.num_evictions == 0


def test_the_least_recently_used_goes_first() -> None:
    one = layers_of([0]).nbytes
    prefixes = PrefixCache(6 * one)
    long = [0, 0, 0, 0, 0, 0, 0, 0]  # two blocks
    for token_ids in ([1], long, [2], [3]):
        prefixes.store(token_ids, layers_of(token_ids))
    prefixes.store([1], layers_of([1]))  # it is there: now used last but one
    prefixes.take([0, 0, 9])  # a copy
    prefixes.store([4], layers_of([4]))
    assert (prefixes.nbytes, prefixes.num_evictions) == (6 * one, 0)

    prefixes.store([5], layers_of([5]))
    assert stored(prefixes) == [tuple(long), (1,), (3,), (4,), (5,)]
    prefixes.store([6] * 8, layers_of([6] * 8))
    assert stored(prefixes) == [tuple(long), (4,), (5,), (6,) * 8]
    assert (prefixes.nbytes, prefixes.num_evictions) == (6 * one, 3)
    prefixes.store([7] * 100, layers_of([7] * 100))  # would never fit
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
        length = number % TINY_VOCABULARY_SIZE
        pending = finish(cache.prefill(0, [*digits, *range(length), 1], CHUNK))
        mx.eval(feed_now(cache, pending))
        cache.commit(pending)
        cache.keep()
        assert prefixes.nbytes <= budget_bytes
        assert mx.get_active_memory() - before <= budget_bytes + 16 * BLOCK_BYTES
    assert prefixes.nbytes > budget_bytes // 2
    assert prefixes.num_evictions > 400


@pytest.mark.parametrize("after_steps", range(1, 8))
def test_a_job_that_outlives_its_session_changes_nothing(after_steps: int) -> None:
    prefixes = PrefixCache(PLENTY)
    cache = session(prefixes, [1, 2, 3, 4, 5])
    driven = Driven(request_stepwise(cache, 3, [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7], [6, 6, 6]))
    for _ in range(after_steps):
        driven.step()
    token_ids = tuple(cache.token_ids[:14])  # without what is proposed
    cache.keep()
    assert stored(prefixes) == [token_ids]
    watch = Watch(prefixes, PLENTY)
    watch.look()
    with contextlib.suppress(AssertionError, CacheTooShortError):  # it would have been closed
        while not driven.has_ended:
            driven.step()
    watch.look()
    request(SessionCache(MODEL, prefixes), 0, [*token_ids, 1])


def test_the_metrics_say_what_it_holds_and_gave() -> None:
    prefixes = PrefixCache(4 * BLOCK_BYTES)
    registry = CollectorRegistry()
    WorkerMetrics(registry, CacheCapacity(1, CacheFootprint()), prefixes)
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


@pytest.mark.parametrize("state", [lambda layer: (layer.keys, layer.values), lambda layer: None])
def test_the_parts_of_a_state_may_change(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They did within mlx-lm 0.32: (keys, values) became (keys, values, offset)."""
    monkeypatch.setattr(KVCache, "state", property(state))
    prefixes = PrefixCache(PLENTY)
    cache = SessionCache(MODEL, prefixes)
    long = [token_id % TINY_VOCABULARY_SIZE for token_id in range(100)]
    finish(verify(cache, Sampler(Sampling(), TINY_VOCABULARY_SIZE), 0, long, [], chunk=Chunks(16)))
    cache.keep()
    layers = prefixes.take([*long[:50], 3, 3])
    assert layers is not None
    reused = layers.num_fed
    assert reused >= 50
    assert all(cache.offset == reused for cache in layers.caches)
    logits = MODEL.network(mx.array([[5]]), cache=layers.caches)[0, -1]
    expected = MODEL.network(mx.array([[*[*long[:50], 3, 3][:reused], 5]]))[0, -1]
    np.testing.assert_allclose(np.array(logits), np.array(expected), atol=1e-3)


class EndOnly:
    """Layers that can go back to their end only, as recurrent states do after a long prompt."""

    nbytes = 1
    companion = None

    def __init__(self, num_fed: int) -> None:
        self.num_fed = num_fed

    source = ()

    def can_serve(self, position: int) -> int:
        return self.num_fed if position >= self.num_fed else 0

    def rewind(self, position: int) -> None:
        assert position == self.num_fed


@given(st.lists(token_lists(1, 6), max_size=12), token_lists(1, 8))
def test_of_entries_that_cannot_go_back_the_longest_prefix_is_found(stored: list[list[int]], wanted: list[int]) -> None:
    prefixes = PrefixCache(PLENTY)
    for tokens in stored:
        prefixes.store(tokens, cast(SessionLayers, EndOnly(len(tokens))))
    longest = max((len(tokens) for tokens in stored if tokens == wanted[: len(tokens)]), default=0)
    taken = prefixes.take(wanted)
    assert (taken.num_fed if taken else 0) == longest

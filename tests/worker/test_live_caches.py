"""The room that a worker's live caches share."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specd.cache_footprint import ALL_TOKENS, CacheFootprint
from specd.errors import ResourceExhaustedError
from specd.worker.session.capacity import CacheCapacity
from specd.worker.session.session_cache import SessionCache

CAPACITY_TOKENS = 10


def make_cache(num_source_tokens: int = 0) -> SessionCache:
    class Cache:
        source = (1,) * num_source_tokens

    return cast(SessionCache, Cache())


@pytest.fixture
def caches() -> CacheCapacity:
    return CacheCapacity(CAPACITY_TOKENS, CacheFootprint({ALL_TOKENS: 1}))


def add(caches: CacheCapacity, num_tokens: int) -> SessionCache:
    cache = make_cache()
    caches.add(cache)
    caches.reserve(cache, num_tokens)
    return cache


@given(st.data())
def test_in_any_order_of_calls_all_get_the_room_that_there_is_and_no_more(data: st.DataObject) -> None:
    caches = CacheCapacity(CAPACITY_TOKENS, CacheFootprint({ALL_TOKENS: 1}, bytes_per_source_token=2))
    expected: dict[SessionCache, int] = {}
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["add", "reserve", "reserve", "discard"])):
            case "add":
                cache = make_cache(data.draw(st.integers(0, 3)))
                caches.add(cache)
                expected[cache] = 0
            case "reserve" if expected:
                cache = data.draw(st.sampled_from([*expected]))
                num_tokens = data.draw(st.integers(0, CAPACITY_TOKENS + 1))
                num_bytes = num_tokens + 2 * len(cache.source)
                if sum({**expected, cache: num_bytes}.values()) <= CAPACITY_TOKENS:
                    caches.reserve(cache, num_tokens)
                    expected[cache] = num_bytes
                else:
                    with pytest.raises(ResourceExhaustedError):
                        caches.reserve(cache, num_tokens)
            case "discard" if expected:
                cache = data.draw(st.sampled_from([*expected]))
                caches.discard(cache)
                del expected[cache]
        assert [*caches] == [*expected]
        assert len(caches) == len(expected)


def test_a_cache_that_finds_no_room_is_told_why_and_what_helps(caches: CacheCapacity) -> None:
    add(caches, 4)
    add(caches, 3)
    cache = add(caches, 0)
    with pytest.raises(ResourceExhaustedError) as refused:
        caches.reserve(cache, 5)
    assert refused.value.reason == "CACHE_FULL"
    assert refused.value.retry_after_seconds > 0
    assert "would need 5 bytes for 5 tokens, and the other 2 sessions hold 7" in str(refused.value)
    assert "room for 10" in str(refused.value)
    assert "--cache-bytes" in str(refused.value)


def test_a_cache_may_fill_the_room_to_the_last_token(caches: CacheCapacity) -> None:
    add(caches, 4)
    add(caches, 6)
    with pytest.raises(ResourceExhaustedError):
        add(caches, 1)


def test_a_cache_alone_may_not_hold_more_than_there_is_room_for(caches: CacheCapacity) -> None:
    with pytest.raises(ResourceExhaustedError):
        add(caches, CAPACITY_TOKENS + 1)


def test_a_cache_that_grows_needs_room_for_what_it_adds_only(caches: CacheCapacity) -> None:
    add(caches, 4)
    cache = add(caches, 5)
    caches.reserve(cache, 6)


def test_a_cache_that_holds_less_leaves_room_to_others(caches: CacheCapacity) -> None:
    cache = add(caches, 10)
    caches.reserve(cache, 3)
    add(caches, 7)


def test_a_cache_that_is_refused_keeps_what_it_had(caches: CacheCapacity) -> None:
    add(caches, 4)
    cache = add(caches, 5)
    with pytest.raises(ResourceExhaustedError):
        caches.reserve(cache, 7)
    with pytest.raises(ResourceExhaustedError):
        add(caches, 2)
    caches.discard(next(iter(caches)))
    caches.reserve(cache, 7)


def test_a_new_cache_takes_no_room_and_is_always_welcome(caches: CacheCapacity) -> None:
    add(caches, 10)
    add(caches, 0)
    assert len(caches) == 2


def test_a_discarded_cache_gives_its_room_back_once(caches: CacheCapacity) -> None:
    add(caches, 5)
    cache = add(caches, 5)
    caches.discard(cache)
    caches.discard(cache)
    assert len(caches) == 1
    add(caches, 5)
    with pytest.raises(ResourceExhaustedError):
        add(caches, 1)


def test_caches_may_come_and_go_while_somebody_goes_through_them(caches: CacheCapacity) -> None:
    added = [add(caches, 1) for _ in range(5)]
    seen = []
    for cache in caches:
        seen.append(cache)
        caches.discard(cache)
        caches.add(make_cache())
    assert seen == added
    assert len(caches) == 5

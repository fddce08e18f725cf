"""What caches take by the number of tokens, and its way over the wire."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specd.cache_footprint import ALL_TOKENS, CacheFootprint
from specd.rpc.messages import footprint_from, to_cache_parts

footprints = st.dictionaries(st.sampled_from([1, 5, 64, ALL_TOKENS]), st.integers(0, 10**6)).map(CacheFootprint)


@given(st.lists(footprints), st.integers(0, 10**6))
def test_a_total_takes_what_its_parts_take(parts: list[CacheFootprint], num_tokens: int) -> None:
    assert CacheFootprint.total(parts).bytes_for(num_tokens) == sum(part.bytes_for(num_tokens) for part in parts)


@given(footprints, st.integers(0, 10**6))
def test_it_never_shrinks_and_windows_stop_growing(footprint: CacheFootprint, num_tokens: int) -> None:
    more = footprint.bytes_for(num_tokens + 1) - footprint.bytes_for(num_tokens)
    assert more == sum(size for most, size in footprint.bytes_per_token.items() if num_tokens < most)


@given(footprints)
def test_it_arrives_as_it_was_sent(footprint: CacheFootprint) -> None:
    assert footprint_from(to_cache_parts(footprint)) == footprint

"""The memory of caches by the number of tokens, and its message."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specd.cache_footprint import ALL_TOKENS, CacheFootprint
from specd.rpc.messages import footprint_from, to_cache_parts
from specd.v1 import model_pb2

sizes = st.integers(0, 10**6)
footprints = st.builds(CacheFootprint, st.dictionaries(st.sampled_from([1, 5, 64, ALL_TOKENS]), sizes), sizes)


@given(st.lists(footprints), sizes, sizes)
def test_a_total_takes_what_its_parts_take(parts: list[CacheFootprint], num_tokens: int, of_source: int) -> None:
    together = CacheFootprint.total(parts).bytes_for(num_tokens, of_source)
    assert together == sum(part.bytes_for(num_tokens, of_source) for part in parts)


@given(footprints, sizes)
def test_it_never_shrinks_and_windows_stop_growing(footprint: CacheFootprint, num_tokens: int) -> None:
    more = footprint.bytes_for(num_tokens + 1) - footprint.bytes_for(num_tokens)
    assert more == sum(size for most, size in footprint.bytes_per_token.items() if num_tokens < most)


@given(footprints)
def test_it_arrives_as_it_was_sent(footprint: CacheFootprint) -> None:
    message = model_pb2.DescribeResponse(
        cache_parts=to_cache_parts(footprint), bytes_per_source_token=footprint.bytes_per_source_token
    )
    assert footprint_from(message) == footprint

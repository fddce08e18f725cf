"""The size of a prompt's chunks, on simulated devices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specd.worker.engine.prefill_chunk import PrefillChunk

SECONDS = 0.1
MULTIPLE, MOST = 16, 2048

times = st.floats(0.0, 1e6)


def run(chunk: PrefillChunk, seconds_of: Callable[[int], float], count: int) -> list[int]:
    """Compute a number of chunks, and return their sizes."""
    sizes = []
    for _ in range(count):
        sizes.append(chunk.num_tokens)
        chunk.took(sizes[-1], seconds_of(sizes[-1]))
    return sizes


def settled(num_tokens: int) -> PrefillChunk:
    """Learn a device without a fixed cost that computes this number of tokens in the wanted time."""
    chunk = PrefillChunk(SECONDS)
    run(chunk, lambda n: n * SECONDS / num_tokens, 30)
    assert abs(chunk.num_tokens - num_tokens) <= MULTIPLE
    return chunk


@given(took=st.lists(st.tuples(st.integers(1, 2 * MOST), times), max_size=50))
def test_a_chunk_is_a_multiple_of_16_within_bounds_whatever_chunks_take(took: list[tuple[int, float]]) -> None:
    chunk = PrefillChunk(SECONDS)
    for num_tokens, seconds in took:
        chunk.took(num_tokens, seconds)
        assert chunk.num_tokens % MULTIPLE == 0
        assert MULTIPLE <= chunk.num_tokens <= MOST


@pytest.mark.parametrize("fixed_part", [0.0, 0.3, 0.6, 0.8])
@given(fitting=st.integers(MULTIPLE, MOST))
@settings(max_examples=50)
def test_chunks_come_to_take_the_wanted_time(fixed_part: float, fitting: int) -> None:
    """With any fixed cost of a pass."""
    fixed = fixed_part * SECONDS
    sizes = run(PrefillChunk(SECONDS), lambda n: fixed + (SECONDS - fixed) * n / fitting, 200)
    assert all(abs(size - fitting) <= MULTIPLE for size in sizes[100:])


@pytest.mark.parametrize(("seconds_per_token", "size"), [(1.0, MULTIPLE), (SECONDS / 17, MULTIPLE), (1e-9, MOST)])
def test_a_device_that_is_too_slow_or_too_fast_gets_what_is_nearest(seconds_per_token: float, size: int) -> None:
    sizes = run(PrefillChunk(SECONDS), lambda n: n * seconds_per_token, 100)
    assert min(sizes[50:]) == size
    assert max(sizes[50:]) <= max(2 * MULTIPLE, size)


def test_a_fast_device_gets_large_chunks_soon() -> None:
    assert run(PrefillChunk(SECONDS), lambda n: n * 1e-6, 7) == [32, 64, 128, 256, 512, 1024, 2048]


@pytest.mark.parametrize("fixed_part", [0.0, 0.3, 0.6, 0.8])
@given(fitting=st.integers(2 * MULTIPLE, MOST))
def test_few_sizes_settle_at_the_largest_that_keeps_the_time(fixed_part: float, fitting: int) -> None:
    """With any fixed cost of a pass, although the first chunk of a size is slow, and after a time that is far off."""
    fixed, planned = fixed_part * SECONDS, set()

    def seconds(n: int) -> float:
        planning = 0.0 if n in planned else SECONDS
        planned.add(n)
        return planning + fixed + (SECONDS - fixed) * n / fitting

    chunk, largest = PrefillChunk(SECONDS, has_few_sizes=True), 1 << (fitting.bit_length() - 1)
    sizes = run(chunk, seconds, 50)
    assert {*sizes[20:]} == {largest}
    assert max(sizes) <= 2 * largest
    assert sizes.count(2 * largest) <= 2
    chunk.took(largest, 1e6)
    assert {*run(chunk, seconds, 50)[20:]} == {largest}


def test_chunks_shrink_as_the_context_that_they_attend_to_grows() -> None:
    chunk, cached = PrefillChunk(SECONDS), 0
    while cached < 100_000:
        num_tokens = chunk.num_tokens
        seconds = num_tokens * (1e-4 + 1e-8 * cached)
        if cached > 10_000:
            assert 0.8 * SECONDS < seconds < 1.2 * SECONDS
        chunk.took(num_tokens, seconds)
        cached += num_tokens


@given(num_tokens=st.integers(2 * MULTIPLE, MOST // 2), seconds=times)
def test_one_time_that_is_far_off_changes_the_size_by_two_at_most_and_is_forgotten(
    num_tokens: int, seconds: float
) -> None:
    chunk = settled(num_tokens)
    before = chunk.num_tokens
    chunk.took(before, seconds)
    assert before // 2 - MULTIPLE < chunk.num_tokens < 2 * (before + MULTIPLE)
    run(chunk, lambda n: n * SECONDS / num_tokens, 12)
    assert abs(chunk.num_tokens - num_tokens) <= MULTIPLE


def test_one_slow_chunk_halves_the_next_and_a_fast_one_doubles_it() -> None:
    chunk = settled(1000)
    chunk.took(chunk.num_tokens, 1e6)
    assert chunk.num_tokens == pytest.approx(500, abs=MULTIPLE)
    chunk = settled(1000)
    chunk.took(chunk.num_tokens, 1e-6)
    assert chunk.num_tokens == pytest.approx(2000, abs=2 * MULTIPLE)


@given(num_tokens=st.integers(64, MOST), part=st.floats(0.0, 0.49), seconds=times)
def test_the_short_rest_of_a_prompt_teaches_nothing(num_tokens: int, part: float, seconds: float) -> None:
    chunk = settled(num_tokens)
    before = chunk.num_tokens
    chunk.took(max(int(before * part), 1), seconds)
    assert chunk.num_tokens == before


@given(num_tokens=st.integers(64, MOST), part=st.floats(0.51, 1.0))
def test_the_long_rest_of_a_prompt_counts_by_what_its_tokens_took(num_tokens: int, part: float) -> None:
    for slower, size in ((1, num_tokens), (2, 0.75 * num_tokens)):
        chunk = settled(num_tokens)
        rest = max(int(chunk.num_tokens * part), chunk.num_tokens // 2)
        chunk.took(rest, rest * slower * SECONDS / num_tokens)
        assert abs(chunk.num_tokens - size) <= 2 * MULTIPLE

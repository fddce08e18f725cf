"""The judgement by which tests of processes call a memory growing."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.e2e.memory import FEWEST_READINGS, lasting_growth

MOST_MIB = 16  # what a test allows a process


@given(
    number=st.integers(FEWEST_READINGS, 20),
    place=st.integers(0, 19),
    reading=st.floats(0, 1000),
    growth=st.floats(0, 100),
)
def test_one_reading_decides_nothing(number: int, place: int, reading: float, growth: float) -> None:
    """With any steady growth, and any growth at the beginning."""
    flat = [198.0] * number
    flat[0] -= growth
    flat[place % number] = reading
    assert lasting_growth(flat) == 0


def test_the_readings_that_failed_a_flat_process_pass() -> None:
    assert lasting_growth([150, 180, 197, 198, 198, 198, 170, 198, 198, 198, 198, 198]) < MOST_MIB
    assert lasting_growth([150, 180, 197, 170, 198, 198, 198, 198, 198, 198, 198, 198]) < MOST_MIB


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("number", [12, 14])
def test_what_goes_up_and_down_is_flat_and_what_leaks_is_not(number: int, seed: int) -> None:
    rng = Random(seed)
    noise = [rng.gauss(0, 3) for _ in range(number)]
    for half in (0, number // 2):
        noise[half + rng.randrange(number // 2)] -= 28  # as the allocator returns pages
    assert lasting_growth([200 + each for each in noise]) < MOST_MIB
    leak = [200 + 5 * i + each for i, each in enumerate(noise)]
    assert lasting_growth(leak) >= MOST_MIB


def test_a_leak_that_the_allocator_takes_in_steps_is_seen() -> None:
    steps = [200 + 32 * (i // 4) for i in range(FEWEST_READINGS)]
    assert lasting_growth(steps) >= MOST_MIB

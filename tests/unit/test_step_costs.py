"""Step costs: interpolation, padding to a cheaper width, and learning from real steps."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specd.step_costs import StepCosts

# A real target on two cores, in milliseconds: four and eight rows at once are cheaper than three and five.
VERIFY = {
    1: 18.0,
    2: 20.0,
    3: 22.0,
    4: 21.0,
    5: 27.0,
    6: 28.0,
    8: 23.0,
    9: 30.0,
    12: 32.0,
    16: 36.0,
    24: 44.0,
    33: 55.0,
}

seconds = st.floats(1e-5, 10.0)
curves = st.dictionaries(st.integers(1, 33), seconds, min_size=1, max_size=10)
tables = st.dictionaries(st.sampled_from([1, 2, 4, 16, 64]), curves, min_size=1, max_size=4)


@given(table=tables)
def test_at_what_was_measured_it_is_what_was_measured(table: dict[int, dict[int, float]]) -> None:
    costs = StepCosts(table)
    assert costs.measured == table
    for sessions, curve in table.items():
        for width, took in curve.items():
            assert costs.seconds(sessions, width) == pytest.approx(took)


@given(curve=curves, width=st.floats(1, 33))
def test_between_two_widths_it_is_between_their_costs(curve: dict[int, float], width: float) -> None:
    costs = StepCosts({1: curve})
    for left, right in pairwise(sorted(curve)):
        if left <= width <= right:
            low, high = sorted((curve[left], curve[right]))
            assert low * (1 - 1e-9) <= costs.seconds(1, width) <= high * (1 + 1e-9)


def test_between_two_widths_it_is_a_line() -> None:
    costs = StepCosts({1: {2: 1.0, 6: 3.0}, 5: {2: 5.0, 6: 11.0}})
    assert costs.seconds(1, 3) == pytest.approx(1.5)
    assert costs.seconds(1, 5.5) == pytest.approx(2.75)
    assert costs.seconds(2, 3) == pytest.approx(1.5 + (6.5 - 1.5) / 4)


def test_beyond_the_last_width_it_goes_on_as_it_did_but_never_down() -> None:
    assert StepCosts({1: {1: 1.0, 4: 2.5, 8: 4.5}}).seconds(1, 10) == pytest.approx(5.5)
    assert StepCosts({1: {1: 1.0, 4: 5.0, 8: 4.0}}).seconds(1, 100) == pytest.approx(4.0)
    assert StepCosts({1: {1: 1.0}, 4: {1: 2.5}}).seconds(7, 1) == pytest.approx(4.0)
    assert StepCosts({1: {4: 1.0, 8: 2.0}, 4: {4: 2.0, 8: 3.0}}).seconds(0.5, 1) == pytest.approx(1.0)


def test_rows_of_different_widths_cost_what_as_many_rows_of_one_session_add() -> None:
    """A kernel computes four rows at once: with four sessions, a fifth row costs as much as four more."""
    costs = StepCosts({1: {1: 8.0, 4: 9.0, 5: 12.0, 8: 12.0, 12: 14.0}, 4: {1: 11.0, 2: 14.0, 3: 16.0}})
    assert [costs.mixed_seconds(4, 1 + rows / 4) for rows in range(5)] == [11.0, 14.0, 14.0, 14.0, 14.0]
    assert costs.mixed_seconds(4, 2.5) == pytest.approx(15.0)
    assert StepCosts({1: {4: 9.0, 5: 12.0, 8: 12.0}}).mixed_seconds(4, 1.25) == pytest.approx(12.0)


@given(table=tables, sessions=st.integers(1, 64), width=st.floats(1, 40))
def test_a_mixed_step_costs_as_much_as_one_of_the_next_widths_or_between(
    table: dict[int, dict[int, float]], sessions: int, width: float
) -> None:
    costs = StepCosts(table)
    low, high = sorted(costs.seconds(sessions, whole) for whole in (math.floor(width), math.ceil(width)))
    assert low * (1 - 1e-9) <= costs.mixed_seconds(sessions, width) <= high * (1 + 1e-9)


@given(table=tables, sessions=st.floats(0.5, 256), width=st.floats(1, 1024))
def test_it_is_never_nothing(table: dict[int, dict[int, float]], sessions: float, width: float) -> None:
    # Beyond the measured widths, the line of a number of sessions continues without an upper bound.
    assert StepCosts(table).seconds(sessions, width) >= min(min(curve.values()) for curve in table.values()) * (
        1 - 1e-9
    )


@given(table=tables, sessions=st.integers(1, 64), width=st.integers(1, 40))
def test_the_width_to_pad_to_is_no_smaller_and_clearly_cheaper_or_the_same(
    table: dict[int, dict[int, float]], sessions: int, width: int
) -> None:
    costs = StepCosts(table)
    best = costs.cheapest_width(sessions, width)
    assert best >= width
    if best != width:
        assert best in table[min(table)]
        assert costs.seconds(sessions, best) < 0.92 * costs.seconds(sessions, width)
    for wider in table[min(table)]:
        if wider > width:
            assert costs.seconds(sessions, wider) >= min(
                costs.seconds(sessions, best), 0.92 * costs.seconds(sessions, width)
            ) * (1 - 1e-9)


def test_the_width_to_pad_to_on_a_real_curve() -> None:
    costs = StepCosts({1: VERIFY})
    padded = {width: costs.cheapest_width(1, width) for width in range(1, 40)}
    assert {width: to for width, to in padded.items() if to != width} == {5: 8, 6: 8, 7: 8}


def test_a_width_is_not_padded_for_what_may_be_noise() -> None:
    assert StepCosts({1: {3: 1.0, 4: 0.94}}).cheapest_width(1, 3) == 3
    assert StepCosts({1: {3: 1.0, 4: 0.9}}).cheapest_width(1, 3) == 4


@given(table=tables, sessions=st.integers(1, 64), width=st.integers(1, 40), took=seconds)
@example(table={1: {1: 1.0}, 2: {1: 1.0}}, sessions=64, width=1, took=1.1)  # far beyond the sessions measured
def test_an_observation_moves_the_estimate_towards_it_and_not_past_it(
    table: dict[int, dict[int, float]], sessions: int, width: int, took: float
) -> None:
    costs = StepCosts(table)
    before = costs.seconds(sessions, width)
    costs.observe(sessions, width, took)
    after = costs.seconds(sessions, width)
    low, high = sorted((before, took))
    assert low * (1 - 1e-9) <= after <= high * (1 + 1e-9)
    if high > 1.01 * low:
        assert abs(after - took) < abs(before - took)


@given(
    table=tables,
    sessions=st.sampled_from([1, 3, 16]),
    width=st.integers(1, 40),
    took=seconds,
    noise=st.sampled_from([0.0, 0.1]),
    rng=st.randoms(use_true_random=False),
)
def test_it_comes_to_what_is_observed_again_and_again(
    table: dict[int, dict[int, float]],
    sessions: int,
    width: int,
    took: float,
    noise: float,
    rng: random.Random,
) -> None:
    costs = StepCosts(table)
    for _ in range(300):
        costs.observe(sessions, width, took * rng.uniform(1 - noise, 1 + noise))
    assert costs.seconds(sessions, width) == pytest.approx(took, rel=0.01 + noise)


@given(table=tables, sessions=st.integers(1, 64), width=st.integers(1, 40), took=st.floats(1e-9, 1e6))
def test_a_single_step_changes_no_estimate_by_much(
    table: dict[int, dict[int, float]], sessions: int, width: int, took: float
) -> None:
    costs = StepCosts(table)
    before = {(n, w): s for n, curve in costs.measured.items() for w, s in curve.items()}
    costs.observe(sessions, width, took)
    after = {(n, w): s for n, curve in costs.measured.items() for w, s in curve.items()}
    for place, estimate in before.items():
        assert 0.8 < after[place] / estimate < 1.25


@given(table=tables, sessions=st.integers(1, 64), width=st.integers(1, 40), took=seconds, parts=st.integers(1, 16))
@example(table={1: {1: 1.0}, 2: {1: 1.0}}, sessions=3, width=1, took=4.0, parts=1)
def test_a_step_of_several_sessions_counts_once(
    table: dict[int, dict[int, float]], sessions: int, width: int, took: float, parts: int
) -> None:
    once, by_parts = StepCosts(table), StepCosts(table)
    once.observe(sessions, width, took)
    for _ in range(parts):
        by_parts.observe(sessions, width, took, weight=1 / parts)
    # Each part finds a little less to be surprised at.
    before = StepCosts(table).seconds(sessions, width)
    for costs in (once, by_parts):
        assert 0 <= (costs.seconds(sessions, width) / before - 1) * (1 if took >= before else -1) < 0.2
    assert by_parts.seconds(sessions, width) == pytest.approx(once.seconds(sessions, width), rel=0.02)


def test_a_level_is_learnt_for_all_widths_and_a_shape_for_its_own() -> None:
    costs = StepCosts({1: VERIFY})
    for _ in range(100):  # everything takes twice as long
        for width in (1, 4, 8):
            costs.observe(1, width, 2 * VERIFY[width])
    for width, took in VERIFY.items():
        assert costs.seconds(1, width) == pytest.approx(2 * took, rel=0.06)
    for _ in range(1000):  # and eight rows come to take as long as nine
        for width in (1, 4, 8):
            costs.observe(1, width, 2 * VERIFY[9 if width == 8 else width])
    assert costs.seconds(1, 8) == pytest.approx(2 * VERIFY[9], rel=0.05)
    assert costs.seconds(1, 1) == pytest.approx(2 * VERIFY[1], rel=0.05)
    assert costs.seconds(1, 4) == pytest.approx(2 * VERIFY[4], rel=0.05)


def test_a_step_is_learnt_where_its_number_of_sessions_is_nearest() -> None:
    costs = StepCosts({1: {1: 1.0, 8: 1.0}, 16: {1: 1.0, 8: 1.0}})
    for _ in range(400):
        costs.observe(6, 8, 3.0)
        costs.observe(6, 1, 1.0)
    ratios = {sessions: curve[8] / curve[1] for sessions, curve in costs.measured.items()}
    assert ratios[16] > 2 > ratios[1]


@given(
    table=tables,
    observed=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 40), seconds), max_size=20),
    sessions=st.floats(1, 64),
    width=st.floats(1, 40),
)
def test_what_is_measured_by_now_makes_costs_that_say_the_same(
    table: dict[int, dict[int, float]],
    observed: list[tuple[int, int, float]],
    sessions: float,
    width: float,
) -> None:
    costs = StepCosts(table)
    for n, w, took in observed:
        costs.observe(n, w, took)
    again = StepCosts(costs.measured)
    assert again.seconds(sessions, width) == pytest.approx(costs.seconds(sessions, width))
    assert again.measured == costs.measured
    assert costs.measured.keys() == table.keys()


def test_what_was_handed_in_stays_as_it_was() -> None:
    table = {1: {1: 1.0, 2: 2.0}}
    costs = StepCosts(table)
    costs.observe(1, 1, 5.0)
    costs.measured[1][1] = 100.0
    assert table == {1: {1: 1.0, 2: 2.0}}
    assert costs.seconds(1, 1) < 2.0


@pytest.mark.parametrize(
    "table", [{}, {1: {}}, {1: {1: 1.0}, 4: {}}, {1: {1: 0.0}}, {1: {1: -1.0}}, {1: {1: math.inf}}, {1: {1: math.nan}}]
)
def test_costs_of_nothing_or_of_no_time_are_refused(table: dict[int, dict[int, float]]) -> None:
    with pytest.raises(AssertionError):
        StepCosts(table)


def test_where_one_number_of_sessions_is_known_more_take_as_long_as_their_tokens() -> None:
    costs = StepCosts({1: VERIFY})
    for sessions, width in ((1, 8), (2, 4), (8, 1), (4, 2)):
        assert costs.seconds(sessions, width) == pytest.approx(VERIFY[8])
    for _ in range(500):
        costs.observe(2, 4, 40.0)
        costs.observe(1, 1, VERIFY[1])
    assert costs.seconds(1, 8) == pytest.approx(40.0, rel=0.02)
    assert costs.seconds(1, 1) == pytest.approx(VERIFY[1], rel=0.02)
    assert costs.seconds(0.5, 8) == costs.seconds(1, 8)

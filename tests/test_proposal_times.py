"""What proposals take, learnt from what they took."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.proposal_times import ProposalTimes
from specd.settings import MAX_NUM_DRAFT_TOKENS
from specd.step_costs import StepCosts

COSTS = StepCosts({1: {1: 2.0, 2: 2.5}, 4: {1: 4.0, 2: 5.0}})


def test_at_first_it_is_what_the_calibration_says() -> None:
    times = ProposalTimes()
    assert times.seconds(COSTS, 1)[:4] == pytest.approx([0.0, 2.5, 4.5, 6.5])
    assert times.seconds(COSTS, 4)[:4] == pytest.approx([0.0, 5.0, 9.0, 13.0])
    assert len(times.seconds(COSTS, 1)) == MAX_NUM_DRAFT_TOKENS + 1


def test_proposals_that_are_all_alike_say_what_these_take_and_no_more() -> None:
    """A draft that takes half as long as expected does so for any number of tokens."""
    times = ProposalTimes()
    for _ in range(200):
        times.observe(COSTS, 1, 5, 0.5 + 5 * 1.0)
    assert times.seconds(COSTS, 1)[5] == pytest.approx(5.5)
    assert times.seconds(COSTS, 1)[2] == pytest.approx(2.5, rel=0.01)


def test_proposals_that_differ_say_what_a_token_adds() -> None:
    times = ProposalTimes()
    for _ in range(100):
        for k in (3, 7, 4, 12):
            times.observe(COSTS, 1, k, 0.5 + 3.0 + 1.0 * k)  # not the 2.0 of a step alone
    known = times.seconds(COSTS, 1)
    assert known[12] - known[3] == pytest.approx(9.0, rel=0.08)
    assert known[7] == pytest.approx(10.5, rel=0.02)


def test_what_is_learnt_with_one_session_holds_for_several_by_what_their_steps_cost() -> None:
    times = ProposalTimes()
    for _ in range(200):
        times.observe(COSTS, 1, 5, 0.5 + 5 * 1.0)
    assert times.seconds(COSTS, 4)[5] == pytest.approx(1.0 + 5 * 2.0)


@given(st.lists(st.tuples(st.integers(1, MAX_NUM_DRAFT_TOKENS), st.floats(0.0, 1e3)), max_size=60))
def test_whatever_was_seen_a_proposal_takes_something_and_a_longer_one_no_less(took: list[tuple[int, float]]) -> None:
    times = ProposalTimes()
    for num_tokens, seconds in took:
        times.observe(COSTS, 1, num_tokens, seconds)
    known = times.seconds(COSTS, 1)
    assert known[0] == 0.0
    assert known[1] > 0
    assert sorted(known) == known


def test_a_single_proposal_can_take_any_time() -> None:
    times = ProposalTimes()
    times.observe(COSTS, 1, 4, 1e6)
    assert times.seconds(COSTS, 1)[4] < 2 * 8.5

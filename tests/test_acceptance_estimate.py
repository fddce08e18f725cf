"""What is known of a session's proposals: by its own rounds, and by what other sessions were."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.acceptance_estimate import AcceptanceEstimate
from coordinator.acceptance_levels import LEVELS, AcceptanceLevels
from coordinator.level_belief import LevelBelief
from coordinator.shared_acceptance import SharedAcceptance
from specd.settings import MAX_NUM_DRAFT_TOKENS

K = 3


def num_accepted(rng: random.Random, level: float, k: int = K) -> int:
    return next((i for i in range(k) if rng.random() >= level), k)


def let_pass(shared: SharedAcceptance, levels: Sequence[float], num_rounds: int, seed: int = 0) -> None:
    """Let a session of each level pass, with so many rounds."""
    rng = random.Random(seed)
    for level in levels:
        estimate = AcceptanceEstimate(shared)
        for _ in range(num_rounds):
            estimate.observe(K, K, num_accepted(rng, level))


def first_accepted(estimate: AcceptanceEstimate) -> float:
    return estimate.accepted()[0]


@pytest.mark.parametrize("level", [0.05, 0.3, 0.5, 0.8, 0.95])
def test_a_session_is_known_by_its_rounds(level: float) -> None:
    shared = SharedAcceptance()
    rng = random.Random(1)
    estimate = AcceptanceEstimate(shared)
    for _ in range(200):
        estimate.observe(K, K, num_accepted(rng, level))
    accepted = estimate.accepted()
    assert accepted[:K] == pytest.approx([level, level**2, level**3], abs=0.12)


@pytest.mark.parametrize("level", [0.05, 0.5, 0.8])
def test_a_session_of_which_nothing_is_known_is_what_others_were(level: float) -> None:
    shared = SharedAcceptance()
    let_pass(shared, [level] * 40, 20)
    assert first_accepted(AcceptanceEstimate(shared)) == pytest.approx(level, abs=0.13)


@pytest.mark.parametrize("num_rounds", [4, 60, 400])
def test_some_sessions_in_vain_do_not_keep_drafts_from_the_next_however_long_they_took(num_rounds: int) -> None:
    shared = SharedAcceptance()
    let_pass(shared, [0.8] * 40, 20)
    let_pass(shared, [0.02] * 4, num_rounds)
    assert first_accepted(AcceptanceEstimate(shared)) > 0.6


def test_where_all_are_in_vain_the_next_is_not_even_tried_and_good_ones_are_soon_known_again() -> None:
    shared = SharedAcceptance()
    let_pass(shared, [0.8] * 40, 20)
    let_pass(shared, [0.02] * 60, 2)
    assert first_accepted(AcceptanceEstimate(shared)) < 0.25
    let_pass(shared, [0.8] * 12, 20)
    assert first_accepted(AcceptanceEstimate(shared)) > 0.5


@pytest.mark.parametrize(("level", "num_rounds"), [(0.02, 2), (0.9, 2)])
def test_where_sessions_are_either_good_or_in_vain_two_rounds_tell(level: float, num_rounds: int) -> None:
    shared = SharedAcceptance()
    let_pass(shared, [0.02, 0.9] * 30, 20)
    estimate = AcceptanceEstimate(shared)
    assert 0.3 < first_accepted(estimate) < 0.8
    for _ in range(num_rounds):
        estimate.observe(K, K, K if level > 0.5 else 0)
    assert first_accepted(estimate) == pytest.approx(level, abs=0.15)


def test_bad_luck_is_forgotten_after_some_rounds_without_proposals() -> None:
    shared = SharedAcceptance()
    let_pass(shared, [0.8] * 40, 20)
    estimate = AcceptanceEstimate(shared)
    for _ in range(4):
        estimate.observe(K, K, 0)
    unlucky = first_accepted(estimate)
    for _ in range(200):
        estimate.fade()
    assert unlucky < 0.4
    assert first_accepted(estimate) > 0.7


def test_a_text_that_changes_is_noticed() -> None:
    rng = random.Random(2)
    estimate = AcceptanceEstimate(SharedAcceptance())
    for level in (0.9, 0.05, 0.9):
        for _ in range(60):
            estimate.observe(K, K, num_accepted(rng, level))
        assert first_accepted(estimate) == pytest.approx(level, abs=0.25)


outcomes = st.lists(
    st.one_of(st.none(), st.tuples(st.integers(1, 8), st.integers(0, 8), st.integers(0, 8)).map(sorted)), max_size=60
)


@given(st.lists(outcomes, min_size=1, max_size=8))
def test_whatever_becomes_of_proposals_it_stays_a_probability_that_falls_with_the_place(
    sessions: list[list[list[int] | None]],
) -> None:
    shared = SharedAcceptance()
    for rounds in sessions:
        estimate = AcceptanceEstimate(shared)
        for outcome in rounds:
            if outcome is None:
                estimate.fade()
            else:
                accepted, proposed, most = outcome
                estimate.observe(most, proposed, accepted)
            for values in (estimate.reached(), estimate.accepted()):
                assert len(values) == MAX_NUM_DRAFT_TOKENS
                assert all(0 <= after <= before <= 1 for before, after in zip([1.0, *values], values, strict=False))
        assert sum(shared.levels.prior()) == pytest.approx(1.0)
        assert all(probability > 0 for probability in shared.levels.prior())


@given(st.lists(st.tuples(st.integers(0, 32), st.booleans()), max_size=40))
def test_a_session_counts_once(rounds: list[tuple[int, bool]]) -> None:
    """However many rounds it has: another like it then finds the same."""
    levels = AcceptanceLevels()
    belief = LevelBelief(levels)
    before = sum(levels._counts)
    for accepted, is_cut in rounds:
        belief.observe(accepted, is_cut=is_cut)
        assert LEVELS[0] <= belief.expected <= belief.hoped_for <= 1.2
    assert sum(levels._counts) == pytest.approx(before * (23 / 24) + 1 if rounds else before)

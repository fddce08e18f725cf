"""A draft on trial is kept if it is surely faster, and taken back otherwise, after 200 rounds at the latest."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.canary.evidence import Evidence
from coordinator.canary.judgement import MOST_ROUNDS, CanaryState, Comparison, Judgement, student_quantile
from tests.unit.canary_trials import TARGET, SimulatedDraft, run_trial

PRESENT = SimulatedDraft()
FASTER = {
    "accepted more often": SimulatedDraft(acceptance=0.88),
    "a third of the cost": SimulatedDraft(acceptance=0.8, seconds=0.0005),
}
SLOWER = {
    "accepted less often": SimulatedDraft(acceptance=0.4),
    "never accepted": SimulatedDraft(acceptance=0.0, spread=0.0),
    "three times the cost": SimulatedDraft(seconds=0.0048),
    "slower than calibrated": SimulatedDraft(slowness=4.0),
}
seeds = st.integers(0, 2**32)


@pytest.mark.parametrize("canary", FASTER.values(), ids=FASTER)
@given(seed=seeds, rounds=st.integers(6, 60))
def test_a_much_faster_canary_is_kept(canary: SimulatedDraft, seed: int, rounds: int) -> None:
    decision = run_trial(PRESENT, canary, seed=seed, rounds=rounds)
    assert decision.num_rounds <= MOST_ROUNDS
    assert decision.state is CanaryState.KEPT


@pytest.mark.parametrize("canary", SLOWER.values(), ids=SLOWER)
@given(seed=seeds, rounds=st.integers(6, 60))
def test_a_much_slower_canary_is_taken_back(canary: SimulatedDraft, seed: int, rounds: int) -> None:
    decision = run_trial(PRESENT, canary, seed=seed, rounds=rounds)
    assert decision.num_rounds <= MOST_ROUNDS
    assert decision.state is CanaryState.TAKEN_BACK


@pytest.mark.parametrize("rounds", [8, 60])
def test_an_equal_canary_is_rarely_kept(rounds: int) -> None:
    """5 % of them may be. If it is so, more than 13 of 120 are with a probability of 0.3 %."""
    decisions = [run_trial(PRESENT, PRESENT, seed=seed, rounds=rounds, share=4) for seed in range(120)]
    assert Counter(each.state for each in decisions)[CanaryState.KEPT] <= 13
    assert max(each.num_rounds for each in decisions) <= MOST_ROUNDS


def test_a_canary_with_a_single_long_text_is_not_kept() -> None:
    """One text is no evidence about others, with any number of rounds."""
    judgement = Judgement()
    for number, (is_canary, accepted) in enumerate([(False, 1), (False, 2), (False, 1), (False, 2), (True, 6)]):
        evidence = judgement.begin("greedy", is_canary=is_canary)
        for _ in range(200):
            evidence.add(6, 6, accepted)
        assert number < 4 or judgement.compare(TARGET, PRESENT.costs, PRESENT.costs) is None


def test_kinds_of_work_are_not_mixed() -> None:
    """The canary has mostly sampled texts, where fewer tokens are accepted, and is better at both kinds."""
    judgement = Judgement()
    accepted = {("greedy", False): 5, ("greedy", True): 6, ("sampled", False): 1, ("sampled", True): 2}
    for kind, is_canary, number in (
        ("greedy", False, 60),
        ("sampled", False, 6),
        ("greedy", True, 6),
        ("sampled", True, 60),
    ):
        for _ in range(number):
            evidence = judgement.begin(kind, is_canary=is_canary)
            for _ in range(4):
                evidence.add(6, 6, accepted[kind, is_canary])
    comparison = judgement.compare(TARGET, PRESENT.costs, PRESENT.costs)
    assert comparison is not None
    assert comparison.canary > 1.1 * comparison.present
    assert comparison.verdict(0.05) is CanaryState.KEPT


def test_without_costs_or_evidence_of_both_a_canary_is_taken_back_at_last() -> None:
    judgement = Judgement()
    assert judgement.compare(TARGET, None, PRESENT.costs) is None
    assert judgement.compare(TARGET, PRESENT.costs, PRESENT.costs) is None
    looks = [number for number in range(1, MOST_ROUNDS + 1) if judgement.add_rounds(1) and judgement.decide(None)]
    assert looks == [50, 100, 200]
    assert judgement.decide(None) is CanaryState.TAKEN_BACK
    assert not judgement.add_rounds(1)


def test_a_present_draft_that_is_never_asked_is_as_fast_as_the_target_alone() -> None:
    """Its planner has found that it does not pay. The canary must not lose for want of a comparison."""
    judgement = Judgement()
    for number in range(40):
        evidence = judgement.begin("greedy", is_canary=number % 2 == 0)
        for accepted in (4, 5, 3, 4 + number % 3):
            if number % 2 == 0:
                evidence.add(6, 6, accepted)
    comparison = judgement.compare(TARGET, PRESENT.costs, PRESENT.costs)
    assert comparison is not None
    assert comparison.present == pytest.approx(1 / TARGET.seconds(1, 1))
    assert comparison.verdict(0.01) is CanaryState.KEPT


def test_proposals_that_end_early_cost_less() -> None:
    """The same tokens are accepted, but one draft ends its proposals where the target would reject a token."""
    sure, unsure = Evidence(), Evidence()
    for accepted in (1, 6) * 50:
        sure.add(6, max(accepted, 1), accepted)
        unsure.add(6, 6, accepted)
    verify, propose = [TARGET.seconds(1, 1 + k) for k in range(7)], [0.002 * k for k in range(7)]
    assert sure.tokens_per_second(verify, propose) > 1.1 * unsure.tokens_per_second(verify, propose)


@pytest.mark.parametrize(
    ("probability", "freedom", "quantile"),  # of tables
    [(0.95, 3, 2.353), (0.975, 3, 3.182), (0.975, 8, 2.306), (0.99, 15, 2.602), (0.99, 4, 3.747), (0.975, 1e9, 1.960)],
)
def test_the_quantiles_are_those_of_tables(probability: float, freedom: float, quantile: float) -> None:
    assert student_quantile(probability, freedom) == pytest.approx(quantile, rel=0.02)


def test_too_few_sessions_decide_nothing() -> None:
    assert Comparison(1.0, 100.0, error=0.0, freedom=2.0).verdict(0.05) is CanaryState.UNDECIDED
    assert Comparison(1.0, 100.0, error=0.1, freedom=3.0).verdict(0.05) is CanaryState.KEPT
    assert Comparison(100.0, 1.0, error=0.1, freedom=3.0).verdict(0.05) is CanaryState.TAKEN_BACK

"""The worth of a draft, from counts and times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specd.pair_worth import DraftTrial, TargetTrial, TrialRounds, rounds_along, worth_of

TARGET = TargetTrial({1: 0.010, 5: 0.012, 9: 0.014})


def decoded(agreements: Sequence[bool], k: int) -> TrialRounds:
    """Return the rounds of a decoder that proposes the draft's choices along the target's text, one by one."""
    target = [*range(len(agreements))]
    draft = [token if agrees else -1 for token, agrees in zip(target, agreements, strict=True)]
    total, emitted = TrialRounds(), 0
    while emitted + k < len(target):
        accepted = 0
        for own, token in zip(draft[emitted : emitted + k], target[emitted:], strict=False):
            if own != token:
                break
            accepted += 1
        total += TrialRounds(1, accepted, int(accepted < k))
        emitted += accepted + 1
    return total


@given(agreements=st.lists(st.booleans(), max_size=60), k=st.integers(1, 8))
def test_rounds_along_a_text_are_those_of_decoding(agreements: list[bool], k: int) -> None:
    rounds = rounds_along(agreements, k)
    assert rounds == decoded(agreements, k)
    assert rounds.emitted == rounds.rounds + rounds.accepted <= len(agreements)


def trial(agreements: Sequence[bool], step_seconds: float) -> DraftTrial:
    rounds = {k: rounds_along(agreements, k) for k in range(1, 9)}
    return DraftTrial(rounds, {k: k * step_seconds for k in (1, 2, 4, 8)})


def test_a_perfect_draft_is_worth_its_rounds() -> None:
    worth = worth_of(TARGET, trial([True] * 90, 0.001))
    assert worth is not None
    assert worth.k == 8
    assert worth.acceptance == 1
    assert worth.tokens_per_second == pytest.approx(9 / (0.008 + 0.014))
    assert worth.speedup == pytest.approx(0.010 * 9 / (0.008 + 0.014))


def test_a_fast_draft_is_worth_more_than_a_slow_one_that_is_always_right() -> None:
    fast = worth_of(TARGET, trial([True, True, False, True, False] * 20, 0.001))
    slow = worth_of(TARGET, trial([True] * 80, 0.012))
    assert fast is not None
    assert slow is not None
    assert slow.acceptance == 1 > fast.acceptance
    assert fast.speedup > 1.5 > 1 > slow.speedup


def test_a_draft_that_is_never_right_gains_nothing() -> None:
    worth = worth_of(TARGET, trial([False] * 80, 0.001))
    assert worth is not None
    assert worth.k == 1
    assert worth.acceptance == 0
    assert worth.speedup < 1


@pytest.mark.parametrize("draft", [DraftTrial(failure="broken"), DraftTrial(), trial([True], 0.001)])
def test_without_a_measured_round_there_is_no_worth(draft: DraftTrial) -> None:
    assert worth_of(TARGET, draft) is None


def test_a_trial_is_restored_from_its_record() -> None:
    measured = trial([True, False] * 20, 0.001)
    assert DraftTrial.restored(measured.as_record()) == measured


@pytest.mark.parametrize(
    "record",
    [
        {"rounds": {}, "seconds": {}, "failure": ""},
        {"rounds": {}, "seconds": {"1": 0}, "failure": ""},
        {"rounds": {}, "seconds": {"1": float("inf")}, "failure": ""},
        {"rounds": {"1": {"rounds": 1, "accepted": -1, "rejected": 0}}, "seconds": {"1": 1}, "failure": ""},
        {"rounds": {"1": {"rounds": 1, "accepted": 1, "rejected": 2}}, "seconds": {"1": 1}, "failure": ""},
        {"rounds": {"1": {"x": 1}}, "seconds": {"1": 1}, "failure": ""},
        {},
    ],
)
def test_a_record_of_what_cannot_be_is_refused(record: Any) -> None:
    with pytest.raises((ValueError, TypeError, LookupError)):
        DraftTrial.restored(record)

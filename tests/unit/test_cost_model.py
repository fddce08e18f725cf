"""The cost model learns from rounds."""

from __future__ import annotations

import pytest

from coordinator.core import Commit, Exchange, Round, Verdict
from coordinator.planner.cost_model import CostModel
from specd.step_costs import StepCosts
from tests.unit.fake_workers import drafted


def model() -> CostModel:
    verifies, proposals = StepCosts({1: {1: 0.02, 8: 0.04}, 4: {1: 0.03, 8: 0.08}}), StepCosts({1: {1: 0.002, 8: 0.01}})
    return CostModel(lambda: verifies, lambda: proposals)


def round_of(num_sessions: int, draft_queue: float, verify_queue: float) -> Round:
    propose = Exchange(draft_queue, 0.006, 0.001, num_sessions=num_sessions)
    verify = Exchange(verify_queue, 0.04, 0.002, num_sessions=num_sessions, step_tokens=5 * num_sessions)
    seconds = propose.seconds + verify.seconds
    return Round(drafted([1] * 4, exchange=propose), Verdict(2, 1, exchange=verify), Commit([1] * 3, 2), 0.0, seconds)


def test_queues_of_a_session_alone_are_overheads() -> None:
    costs = model()
    costs.observe(round_of(1, 0.003, 0.004), 1)
    learnt = costs.costs(1)
    assert learnt is not None
    assert (learnt.draft_overhead, learnt.round_overhead) == pytest.approx((0.004, 0.006))
    assert learnt.draft_wait == 0.0


@pytest.mark.parametrize(
    ("verify_queue", "wait"), [(0.002, 0.005), pytest.param(0.5, 0.006, id="another session's prompt was computed")]
)
def test_queues_of_several_sessions_are_waits_of_no_more_than_a_proposal(verify_queue: float, wait: float) -> None:
    costs = model()
    for _ in range(3):
        costs.observe(round_of(4, 0.003, verify_queue), 4)
    learnt = costs.costs(4)
    assert learnt is not None
    assert (learnt.draft_overhead, learnt.round_overhead) == pytest.approx((0.001, 0.002))
    assert learnt.draft_wait == pytest.approx(wait)

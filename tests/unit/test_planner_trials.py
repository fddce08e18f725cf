"""When the planner tries another k."""

from __future__ import annotations

from dataclasses import replace

from coordinator.core import Exchange
from coordinator.planner.planner import SessionPlanner
from coordinator.sources import Sources
from specd.sampling import Sampling
from specd.vocabulary import TokenSource
from tests.unit.simulation import Simulation, World
from tests.unit.test_planner import round_of


def rounds_to_a_control(session: SessionPlanner, *, most: int) -> int:
    """Run rounds until one is planned without draft tokens, and return their number."""
    for number in range(most):
        plan = session.plan()
        if not (k := plan.limit(TokenSource.DRAFT)):
            return number
        session.observe(plan, round_of(k, k, seconds=0.05))
    return most


def test_a_prefill_within_a_trial_does_not_put_off_the_next_one() -> None:
    """A control round that waits for a prefill says nothing, and its time is not what the trial has cost."""
    session = Simulation(World()).planner.begin(Sampling(), Sources((TokenSource.DRAFT,)), client="")
    assert rounds_to_a_control(session, most=2000) < 2000
    slow = round_of(0, 0, seconds=20.0)
    session.observe(session.plan(), replace(slow, verdict=replace(slow.verdict, exchange=Exchange(num_tokens=200))))
    while not session.plan().limit(TokenSource.DRAFT):
        session.observe(session.plan(), round_of(0, 0))
    assert rounds_to_a_control(session, most=2000) < 2000

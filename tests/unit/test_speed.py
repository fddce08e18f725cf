"""Predictions of what a token takes, for sessions that run together in a simulated world."""

from __future__ import annotations

import pytest

from coordinator.planner.speed import Speed
from specd.sampling import Sampling
from tests.unit.simulation import Simulation, World


@pytest.mark.parametrize("k", [None, 0, 3])
@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_predictions_come_true(at_once: int, k: int | None) -> None:
    simulation = Simulation(World())
    simulation.run(num_sessions=32, at_once=at_once, tokens=128)
    actual = at_once / simulation.run(num_sessions=32, at_once=at_once, tokens=128, k=k)
    simulation.planner.begin(Sampling(), k)
    predicted = Speed(simulation.planner).seconds_per_token(at_once)
    print(f"predicted {predicted * 1e3:.1f} ms, actual {actual * 1e3:.1f} ms")
    assert predicted == pytest.approx(actual, rel=0.25)


def test_without_a_draft_it_predicts_the_target_alone() -> None:
    simulation = Simulation(World())
    session = simulation.planner.begin(Sampling())
    session.has_fault = True
    costs = simulation.planner.cost_model.costs(2)
    assert costs is not None
    assert Speed(simulation.planner).seconds_per_token(2) == costs.target_only


def test_a_prediction_holds_for_some_rounds() -> None:
    simulation = Simulation(World())
    speed = Speed(simulation.planner)
    assert speed.seconds_per_token(1) == simulation.planner.cost_model.costs(1).target_only  # type: ignore[union-attr]
    simulation.planner.begin(Sampling())
    before = speed.seconds_per_token(1)
    simulation.planner.num_rounds += 64
    assert speed.seconds_per_token(1) < before

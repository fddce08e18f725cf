"""The planner's learning from sessions stays with their client, and takes bounded memory."""

from __future__ import annotations

from specd.sampling import Sampling
from tests.unit.simulation import Simulation, World


def test_what_one_client_teaches_changes_nothing_for_another() -> None:
    simulation = Simulation(World())
    planner = simulation.planner
    before = planner.begin(Sampling(), client="b").acceptance.accepted()
    for _ in range(10):  # whose drafts are never accepted
        session = planner.begin(Sampling(), client="a")
        for _ in range(50):
            session.acceptance.add(8, (), 8, 0)
        session.learning.match_gain.add(5.0)
        session.learning.probes.probed(1e6)
        session.close()
    other = planner.begin(Sampling(), client="b")
    assert other.acceptance.accepted() == before
    assert other.learning.match_gain.value == 0
    assert other.learning.probes.is_due
    assert planner.begin(Sampling(), client="a").acceptance.accepted()[0] < before[0]


def test_a_client_that_tries_every_temperature_keeps_no_more_than_some() -> None:
    planner = Simulation(World()).planner
    usual = planner.begin(Sampling(), client="b").learning.pool(Sampling())
    for tenth in range(1, 1000):
        planner.begin(Sampling(temperature=tenth / 10), client="a").close()
    assert planner.begin(Sampling(), client="b").learning.pool(Sampling()) is usual
    assert len(planner.begin(Sampling(), client="a").learning._pools) <= 128


def test_the_clients_that_are_remembered_are_the_latest() -> None:
    learning = Simulation(World()).planner._learning
    first, second = learning.of("first"), learning.of("second")
    for number in range(126):
        learning.of(str(number))
    assert learning.of("first") is first
    learning.of("one more")
    assert learning.of("first") is first
    assert learning.of("second") is not second

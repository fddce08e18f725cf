"""The planner's memory of clients: one client's texts neither mislead another's, nor its own next text."""

from __future__ import annotations

import pytest

from coordinator.core import Plan
from coordinator.planner.session_planner import SessionPlanner
from specd.sampling import Acceptance, Sampling
from specd.vocabulary import TokenSource
from tests.unit.simulation import Simulation, World
from tests.unit.test_planner import DRAFT_ALONE, WORLDS, accepted_by, round_of


def test_a_session_does_not_begin_with_the_k_of_another_clients_session() -> None:
    (simulation := Simulation(WORLDS["good draft"])).run(num_sessions=2, at_once=1, tokens=64)
    planner = simulation.planner
    teaching = SessionPlanner(planner, Sampling(), DRAFT_ALONE, client="mallory")
    for _ in range(100):
        teaching.plan()
        teaching.observe(Plan({TokenSource.DRAFT: 8}), round_of(8, 0))
    teaching.close()
    for _ in range(20):  # at any place in a window
        session = SessionPlanner(planner, Sampling(), DRAFT_ALONE, client="bob")
        k = session.plan().limit(TokenSource.DRAFT)
        session.observe(session.plan(), round_of(k, k))
        session.close()
        spoilt = SessionPlanner(planner, Sampling(), DRAFT_ALONE, client="mallory")
        assert k > spoilt.plan().limit(TokenSource.DRAFT)
        spoilt.close()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(logit_bias={5: 2.0}),
        Sampling(repetition_penalty=1.2),
        Sampling(presence_penalty=0.5),
        Sampling(frequency_penalty=0.5),
        Sampling(suppressed_token_ids=(2,), suppressed_before=10),  # min_tokens
    ],
    ids=["logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens"],
)
def test_biased_sessions_teach_others_nothing(sampling: Sampling) -> None:
    """Their acceptance says nothing about others: vllm-project/vllm#57533."""
    simulation = Simulation(World())

    def accepted() -> list[float]:
        session = SessionPlanner(simulation.planner, Sampling(), client="")
        session.close()
        return accepted_by(session).survival(4)

    before = accepted()
    biased = SessionPlanner(simulation.planner, sampling, client="")
    own = accepted_by(biased).survival(4)
    for _ in range(20):
        biased.observe(Plan({TokenSource.DRAFT: 4}), round_of(4, 0))
        biased.plan()
    assert accepted_by(biased).survival(4)[0] < own[0]  # it learns for itself
    assert accepted() == before
    biased.close()
    typical = SessionPlanner(simulation.planner, Sampling(), client="")
    typical.plan()
    for _ in range(20):
        typical.observe(Plan({TokenSource.DRAFT: 4}), round_of(4, 0))
    assert accepted() < before


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("before", [0.2, 0.5])
def test_a_text_is_judged_by_its_own_tokens_and_not_by_those_of_other_texts(before: float, at_once: int) -> None:
    """After many texts of a client that suit the draft less, one that suits it is soon as fast as without them."""
    acceptance = 0.95

    def rate(*, taught: bool) -> float:
        nonlocal acceptance
        simulation = Simulation(World(lambda _: acceptance))
        if taught:
            acceptance = before
            simulation.run(num_sessions=8 * at_once, at_once=at_once, tokens=256)
        acceptance = 0.95
        return simulation.run(num_sessions=at_once, at_once=at_once, tokens=160)

    assert rate(taught=True) >= 0.85 * rate(taught=False)


def test_kinds_of_sampling_are_learnt_apart() -> None:
    planner = Simulation(World()).planner
    greedy = SessionPlanner(planner, Sampling(), client="")
    others = [Sampling(temperature=1.0), Sampling(acceptance=Acceptance.REJECTION)]
    before = [accepted_by(SessionPlanner(planner, sampling, client="")).survival(4) for sampling in others]
    greedy.plan()
    for _ in range(50):
        greedy.observe(Plan({TokenSource.DRAFT: 4}), round_of(4, 0))
    assert [accepted_by(SessionPlanner(planner, sampling, client="")).survival(4) for sampling in others] == before


def test_what_one_client_teaches_changes_nothing_for_another() -> None:
    planner = Simulation(World()).planner
    other = SessionPlanner(planner, Sampling(), client="b")
    before = accepted_by(other).survival(4)
    other.close()
    session = SessionPlanner(planner, Sampling(), client="a")
    session.plan()
    for _ in range(50):
        session.observe(Plan({TokenSource.DRAFT: 8}), round_of(8, 0))
    session.close()
    assert accepted_by(SessionPlanner(planner, Sampling(), client="b")).survival(4) == before
    assert accepted_by(SessionPlanner(planner, Sampling(), client="a")).survival(4)[0] < before[0]


def test_what_is_remembered_of_clients_is_bounded() -> None:
    planner = Simulation(World()).planner

    def begin(client: str, temperature: float = 0.0) -> None:
        session = SessionPlanner(planner, Sampling(temperature=temperature), client=client)
        accepted_by(session)
        session.close()

    begin("b")
    (name,) = planner.clients
    usual = planner.clients[name]
    for tenth in range(1, 1000):  # a client that tries every temperature
        begin("a", tenth / 10)
    begin("b")
    assert max(len(each.pools) for each in planner.clients.values()) <= 4 * 9
    for number in range(126):
        begin(str(number))
    begin("b")
    assert planner.clients[name] is usual, "it is one of the latest"
    for number in range(200):
        begin(str(number))
    assert len(planner.clients) <= 128
    assert name not in planner.clients


def test_sessions_of_a_new_client_that_begin_together_learn_together() -> None:
    """Each learnt alone that the draft suits none of them."""
    planner = Simulation(World()).planner
    teaching, other = (SessionPlanner(planner, Sampling(), client="") for _ in range(2))
    before = other.proposals(alone=False).accepted.mean()
    teaching.plan()
    for _ in range(3):
        teaching.observe(Plan({TokenSource.DRAFT: 4}), round_of(4, 0))
    assert other.proposals(alone=False).accepted.mean() < before - 0.1

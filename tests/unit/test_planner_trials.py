"""When the planner tries another k, which rounds it measures, and what matches teach about other matches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.core import Exchange, Match, Part, Plan, Proposal, Round
from coordinator.planner.planner import Planner
from coordinator.planner.round_costs import RoundCosts
from coordinator.planner.session_planner import SessionPlanner
from coordinator.sources import Sources
from specd.sampling import Sampling
from specd.step_costs import StepCosts
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
    session = SessionPlanner(Simulation(World()).planner, Sampling(), Sources((TokenSource.DRAFT,)), client="")
    assert rounds_to_a_control(session, most=2000) < 2000
    slow = round_of(0, 0, seconds=20.0)
    session.observe(session.plan(), replace(slow, verdict=replace(slow.verdict, exchange=Exchange(num_tokens=200))))
    while not session.plan().limit(TokenSource.DRAFT):
        session.observe(session.plan(), round_of(0, 0))
    assert rounds_to_a_control(session, most=2000) < 2000


def test_the_prefill_of_one_session_teaches_no_costs_of_the_others_rounds() -> None:
    """It shares the target with them, so that their rounds wait for it."""
    planner = Simulation(World()).planner
    running, new = (SessionPlanner(planner, Sampling(), Sources((TokenSource.DRAFT,), 4), client="") for _ in range(2))

    def run() -> None:
        for _ in range(20):
            running.observe(running.plan(), round_of(4, 4, seconds=5.0))

    running.observe(running.plan(), round_of(4, 4))
    before = planner.costs.seconds(1, 4)
    run()
    assert planner.costs.seconds(1, 4) == before
    new.observe(new.plan(), round_of(4, 4))
    run()
    assert planner.costs.seconds(1, 4) > before


def round_with_match(k: int, num_accepted: int, *, seconds: float = 0.05) -> Round:
    whole = round_of(k, num_accepted, seconds=seconds)
    return replace(whole, proposal=Proposal((Part(TokenSource.LOOKUP, [1] * k),)))


def test_matches_are_expected_to_be_as_right_as_matches_of_other_lengths() -> None:
    lengths = {}
    for num_accepted in (0, 8):
        session = SessionPlanner(Simulation(World()).planner, Sampling(), Sources((TokenSource.LOOKUP,)), client="")
        for _ in range(20):
            plan = session.plan([Match(TokenSource.LOOKUP, [1] * 8, 3)])
            if k := plan.limit(TokenSource.LOOKUP):
                session.observe(plan, round_with_match(k, min(k, num_accepted)))
        lengths[num_accepted] = session.plan([Match(TokenSource.LOOKUP, [1] * 8, 9)]).limit(TokenSource.LOOKUP)
    fresh = SessionPlanner(Simulation(World()).planner, Sampling(), Sources((TokenSource.LOOKUP,)), client="")
    assert lengths[0] < fresh.plan([Match(TokenSource.LOOKUP, [1] * 8, 9)]).limit(TokenSource.LOOKUP) <= lengths[8]


def test_a_kind_of_match_that_failed_at_first_gets_another_chance() -> None:
    """A cheap match was given up for good after its first two failures, though the next ones would have been right."""
    session = SessionPlanner(Simulation(World()).planner, Sampling(), client="")
    weak, strong = Match(TokenSource.LOOKUP, [1] * 8, 1), Match(TokenSource.LOOKUP, [1] * 8, 6)
    tries = 0
    for number in range(300):
        match = weak if number % 2 else strong
        plan = session.plan([match])
        drafted, k = plan.limit(TokenSource.DRAFT), plan.limit(TokenSource.LOOKUP)
        is_try = match is weak and k > 0
        if is_try and number < 100:
            session.observe(plan, round_with_match(k, 0))
        elif k:
            session.observe(plan, round_with_match(k, k))
        else:
            session.observe(plan, round_of(drafted, min(drafted, 3)))
        tries += is_try and number > 250
    assert tries > 5


def test_a_window_expects_the_costs_of_its_lengths_and_not_of_their_mean() -> None:
    """Kernels that prefer some widths: no proposal has the mean of their lengths."""
    world = World(verify=lambda _, width: 0.020 if width <= 4 else 0.030 if width <= 8 else 0.050)
    planner = Simulation(world).planner
    session = SessionPlanner(planner, Sampling(), Sources((TokenSource.DRAFT,)), client="")
    for _ in range(40):
        for length in (3, 8):
            session.proposals(alone=True).add(8, length - 1, length)
    seconds = planner.expected([session])[2]
    costs = planner.costs.seconds
    assert abs(seconds[8] - (costs(1, 3) + costs(1, 8)) / 2) < 0.0005


def test_looked_up_tokens_of_others_in_the_step_do_not_make_rounds_without_them_dear() -> None:
    planner = Simulation(World()).planner
    sessions = [SessionPlanner(planner, Sampling(), Sources((TokenSource.LOOKUP,)), client="") for _ in range(4)]
    seconds = planner.costs.seconds(4, 0, 2.0)
    alone = round_of(0, 0, seconds=seconds)
    beside_others = replace(
        alone, verdict=replace(alone.verdict, exchange=replace(alone.verdict.exchange, num_sessions=4, step_tokens=12))
    )
    for _ in range(40):
        for session in sessions:
            session.observe(session.plan(), beside_others)
    assert abs(planner.costs.seconds(4, 0, 2.0) / seconds - 1) < 0.01
    (measured,) = planner.costs.measured.values()
    assert measured.num_rounds > 20


def test_fast_rounds_of_one_client_do_not_change_the_plans_of_another() -> None:
    """They would tell the other how well the first one's text is guessed (vllm-project/vllm#57533)."""
    planner, match = Simulation(World()).planner, Match(TokenSource.LOOKUP, [1] * 32, 3)

    def planned(client: str) -> Plan:
        session = SessionPlanner(planner, Sampling(), client=client)
        plan = session.plan([match])
        session.close()
        return plan

    before = planned("alice")
    fast = SessionPlanner(planner, Sampling(), client="bob")
    for _ in range(100):
        fast.plan([match])
        fast.observe(Plan({TokenSource.LOOKUP: 32}), round_with_match(32, 32, seconds=0.001))
    fast.close()
    assert planned("alice") == before
    assert planned("bob") != before


@pytest.mark.parametrize("is_right", [True, False])
def test_matches_lengthen_the_drafts_proposals_as_long_as_they_are_right(is_right: bool) -> None:
    """The draft ends after four right tokens. A match is right behind them or never, and never on its own."""
    session = SessionPlanner(Simulation(World()).planner, Sampling(), client="")
    match = Match(TokenSource.LOOKUP, [1] * 20, 1)
    lengthened = 0
    for number in range(200):
        plan = session.plan([match])
        k, longer = min(plan.limit(TokenSource.DRAFT), 4), plan.limit(TokenSource.LOOKUP)
        num_accepted = k + is_right * longer if k else 0
        round_ = round_of(k, k)
        parts = Part(TokenSource.DRAFT, [1] * k), Part(TokenSource.LOOKUP, [1] * longer)
        verdict = replace(round_.verdict, num_accepted=num_accepted)
        session.observe(plan, replace(round_, proposal=Proposal(parts), verdict=verdict))
        lengthened += number >= 100 and k > 0 and longer > 0
    assert lengthened > 70 if is_right else lengthened < 30


def test_matched_tokens_of_one_session_fill_the_rows_that_are_computed_anyway() -> None:
    """With four sessions, a fifth row costs as much as four more: a single token is not worth it, three are."""
    target = StepCosts({1: {1: 0.008, 4: 0.009, 5: 0.013, 8: 0.013, 9: 0.017}, 4: {1: 0.011, 2: 0.015, 3: 0.019}})
    planner = Planner(RoundCosts(lambda: target, lambda: None))
    lookup_alone = Sources((TokenSource.LOOKUP,))
    sessions = [SessionPlanner(planner, Sampling(), lookup_alone, client="") for _ in range(4)]
    for num_tokens, expected in ((1, 0), (3, 3), (9, 4)):
        plan = sessions[0].plan([Match(TokenSource.LOOKUP, [1] * num_tokens, 1)])
        assert plan.limit(TokenSource.LOOKUP) == expected


def test_a_row_that_is_computed_anyway_is_for_one_session_of_a_step() -> None:
    """Seven sessions leave one of eight rows free, and all of them have matches, half of which are right."""
    rows = {1: 0.008, 4: 0.008, 5: 0.010, 8: 0.010, 9: 0.014, 12: 0.014, 13: 0.018, 16: 0.018}
    target = StepCosts({1: rows, 7: {1: 0.010, 2: 0.018}})
    planner = Planner(RoundCosts(lambda: target, lambda: None))
    sessions = [SessionPlanner(planner, Sampling(), Sources((TokenSource.LOOKUP,)), client="") for _ in range(7)]
    plans, num_tried = [Plan()] * 7, 0

    def continued(i: int, ended_at: float) -> int:
        """End the round of a session, and return the number of matched tokens in its next one."""
        nonlocal num_tried
        k = plans[i].limit(TokenSource.LOOKUP)
        num_tried += k
        round_ = round_with_match(k, k * num_tried % 2)
        sessions[i].observe(plans[i], replace(round_, started_at=ended_at - 0.01, ended_at=ended_at))
        plans[i] = sessions[i].plan([Match(TokenSource.LOOKUP, [1], 1)])
        return plans[i].limit(TokenSource.LOOKUP)

    for session in sessions:
        session.plan()
    for number in range(1, 13):
        assert [continued(i, number * 0.01) for i in range(7)] == [1, 0, 0, 0, 0, 0, 0]
    assert continued(6, 0.127) == 1, "the others are in a step that began before"

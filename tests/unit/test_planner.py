"""The planner: against every fixed k in simulated worlds, and what it learns from whom."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core import Commit, Exchange, Match, Plan, Round, Verdict
from coordinator.planner.acceptance import PassRates
from coordinator.planner.planner import Planner
from coordinator.planner.round_costs import RoundCosts
from coordinator.planner.session_planner import SessionPlanner
from coordinator.sources import Sources
from specd.sampling import Sampling
from specd.setting_types import MAX_NUM_DRAFT_TOKENS
from specd.step_costs import StepCosts
from specd.vocabulary import FinishReason, TokenSource
from tests.unit.fake_workers import drafted
from tests.unit.simulation import Simulation, World

DRAFT_ALONE, LOOKUP_ALONE = Sources((TokenSource.DRAFT,)), Sources((TokenSource.LOOKUP,))

WORLDS = {
    "good draft": World(),
    "random draft": World(lambda _: 0.02),
    "slow draft": World(draft=lambda _, k: 0.010 * k),
    "draft is the target": World(lambda _: 0.97, draft=lambda _, k: 0.021 * k),
    "half of the texts suit": World(lambda i: 0.9 if i % 2 else 0.1),
    "draft 5 ms away": World(wire=0.010),
    "confidence says nothing": World(informative=False),
    "calibrated while busy": World(target_bias=1.5, draft_bias=0.7),
    "drafts calibrated as free": World(lambda _: 0.5, draft=lambda _, k: 0.015 + 0.001 * k, draft_bias=0.1),
    "workers compete for cores": World(contention=1.3),
}


def accepted_by(session: SessionPlanner) -> PassRates:
    return session.proposals(alone=True).accepted


def given_k(k: int) -> Sources:
    return Sources((TokenSource.DRAFT,), k)


@pytest.mark.parametrize("at_once", [1, 8])
@pytest.mark.parametrize("name", WORLDS)
def test_tokens_per_second_are_near_those_of_the_best_fixed_k(name: str, at_once: int) -> None:
    """From the start, of which 16 sessions of 64 tokens are six seconds."""

    def rate(sources: Sources) -> float:
        return Simulation(WORLDS[name]).run(num_sessions=16, at_once=at_once, tokens=64, sources=sources)

    best = max(rate(given_k(k)) for k in (0, 1, 3, 6))
    adaptive = rate(Sources())
    print(f"{adaptive / best:.3f} of the best k")
    assert adaptive >= 0.88 * best


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("name", WORLDS)
def test_it_comes_to_the_best_fixed_k(name: str, at_once: int) -> None:
    def rate(sources: Sources) -> float:
        simulation = Simulation(WORLDS[name])
        simulation.run(num_sessions=16, at_once=at_once, tokens=96, sources=sources)
        return simulation.run(num_sessions=16, at_once=at_once, tokens=96, sources=sources)

    best = max(rate(given_k(k)) for k in (0, 1, 3, 6))
    adaptive = rate(Sources())
    print(f"{adaptive / best:.3f} of the best k")
    assert adaptive >= 0.92 * best, "the planner learns the acceptance of each text again"


@pytest.mark.parametrize("at_once", [1, 8])
def test_a_random_draft_is_found_out_within_rounds_and_then_rarely_asked(at_once: int) -> None:
    def rate(simulation: Simulation, sources: Sources) -> float:
        return simulation.run(num_sessions=2 * at_once, at_once=at_once, tokens=128, sources=sources)

    simulation, world = Simulation(WORLDS["random draft"]), WORLDS["random draft"]
    target_only = rate(Simulation(world), given_k(0))
    assert rate(simulation, Sources()) >= 0.97 * target_only
    assert rate(simulation, Sources()) >= 0.97 * target_only


@given(
    k=st.integers(0, MAX_NUM_DRAFT_TOKENS) | st.none(),
    allowed=st.sampled_from([(), (TokenSource.DRAFT,), (TokenSource.LOOKUP,), (TokenSource.DRAFT, TokenSource.LOOKUP)]),
    rounds=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 32), st.floats(1e-6, 10.0)), max_size=40),
)
def test_a_plan_has_only_what_the_request_allows(
    k: int | None, allowed: tuple[TokenSource, ...], rounds: list[tuple[int, int, float]]
) -> None:
    session = SessionPlanner(Simulation(World()).planner, Sampling(), Sources(allowed, k), client="")
    looks_up = TokenSource.LOOKUP in allowed
    for num_accepted, num_matched, seconds in rounds:
        plan = session.plan(
            [Match(TokenSource.LOOKUP, [1] * num_matched, num_matched)] * (looks_up and num_matched > 0)
        )
        assert {*plan.limits} <= {*allowed}
        num_tokens = plan.limit(TokenSource.DRAFT)
        assert 0 <= num_tokens <= MAX_NUM_DRAFT_TOKENS
        if k is not None:
            assert plan == Plan(dict.fromkeys(allowed, k), most=k)
        else:
            assert plan.limit(TokenSource.LOOKUP) <= num_matched
            assert len(plan.min_confidences) == max(num_tokens - 1, 0)
        session.observe(plan, round_of(num_tokens, min(num_accepted, num_tokens), seconds=seconds))


def test_drafting_resumes_when_the_draft_becomes_good() -> None:
    """Trials find it out: without them, a draft that was given up is never asked again."""
    good = False
    simulation = Simulation(World(lambda _: 0.9 if good else 0.02))
    bad_rate = simulation.run(num_sessions=8, at_once=1, tokens=256)
    good = True
    simulation.run(num_sessions=60, at_once=1, tokens=256)
    assert simulation.run(num_sessions=8, at_once=1, tokens=256) > 1.5 * bad_rate


def test_drafting_stops_when_the_machine_makes_it_dear() -> None:
    """A control round shows it: the rounds with drafts alone would be taken for a machine that is slower."""
    simulation = Simulation(World(contention=1.0))
    simulation.run(num_sessions=16, at_once=4, tokens=128)
    simulation.world = World(contention=4.0)
    simulation.run(num_sessions=48, at_once=4, tokens=128)
    rate = simulation.run(num_sessions=16, at_once=4, tokens=128)
    alone = Simulation(simulation.world).run(num_sessions=16, at_once=4, tokens=128, sources=given_k(0))
    assert rate >= 0.92 * alone


def test_a_stalled_session_does_not_count_as_active() -> None:
    simulation = Simulation(World())
    stalled = SessionPlanner(simulation.planner, Sampling(), client="")
    stalled.plan()
    assert len(simulation.planner.running.active()) == 1
    simulation.run(num_sessions=1, at_once=1, tokens=400)
    running = SessionPlanner(simulation.planner, Sampling(), client="")
    running.plan()
    assert simulation.planner.running.active() == [running]
    stalled.plan()  # its client reads again
    assert len(simulation.planner.running.active()) == 2


def test_a_paused_session_does_not_count_as_active() -> None:
    planner, is_paused = Simulation(World()).planner, True
    SessionPlanner(planner, Sampling(), is_paused=lambda: is_paused, client="").plan()
    assert planner.running.active() == []
    is_paused = False
    assert len(planner.running.active()) == 1, "before it plans again"


def test_a_session_that_ended_does_not_count_as_active() -> None:
    simulation = Simulation(World())
    for _ in range(3):
        SessionPlanner(simulation.planner, Sampling(), client="").close()
    assert simulation.planner.running.active() == []


def test_a_session_in_the_place_of_another_begins_a_window_and_an_end_alone_does_so_later() -> None:
    planner = Simulation(World()).planner
    sessions = [SessionPlanner(planner, Sampling(), DRAFT_ALONE, client="") for _ in range(3)]
    plans = [session.plan() for session in sessions]

    def rounds(num: int) -> list[int]:
        """Run rounds of each session, and return by round the sessions for which the last of them plans."""
        planned_for = []
        for _ in range(num):
            for i, session in enumerate(sessions):
                session.observe(plans[i], round_of(plans[i].limit(TokenSource.DRAFT), 0))
                plans[i] = session.plan()
            window = planner.window()
            planned_for.append(window.num_active if window is not None else 0)
        return planned_for

    assert rounds(5) == [3] * 5
    sessions.pop().close()
    plans.pop()
    assert rounds(1) == [3], "another session may take the place"
    sessions.append(SessionPlanner(planner, Sampling(), DRAFT_ALONE, client=""))
    plans.append(sessions[-1].plan())
    assert rounds(5) == [3] * 5
    sessions.pop().close()
    plans.pop()
    assert rounds(3) == [3, 2, 2], "no other session came"


def test_rounds_of_fewer_sessions_than_the_window_is_for_teach_no_costs() -> None:
    planner = Simulation(World()).planner
    sessions = [SessionPlanner(planner, Sampling(), DRAFT_ALONE, client="") for _ in range(2)]
    plans = [session.plan() for session in sessions]
    for _ in range(32):
        for i, session in enumerate(sessions):
            session.observe(plans[i], round_of(plans[i].limit(TokenSource.DRAFT), 0))
            plans[i] = session.plan()
    (staying, ended), plan = sessions, plans[0]
    before = planner.costs.seconds(2, 4)
    ended.close()
    staying.observe(plan, round_of(plan.limit(TokenSource.DRAFT), 0, seconds=5.0))
    for _ in range(4):
        staying.observe(staying.plan(), round_of(0, 0))
    assert staying.runs_alone
    assert planner.costs.seconds(2, 4) == pytest.approx(before, rel=0.05)


def test_sessions_that_run_together_have_one_k() -> None:
    simulation = Simulation(World(lambda i: 0.9 if i % 2 else 0.1))
    simulation.run(num_sessions=8, at_once=4, tokens=96)
    sessions = [SessionPlanner(simulation.planner, Sampling(), client="") for _ in range(4)]
    assert len({session.plan().limit(TokenSource.DRAFT) for session in sessions}) == 1


def test_the_first_round_that_may_have_a_proposal_has_one() -> None:
    """Nothing was learnt, and calibration tells that drafting should pay."""
    for n in (1, 4):
        planner = Simulation(World()).planner
        sessions = [SessionPlanner(planner, Sampling(), client="") for _ in range(n)]
        assert all(session.will_draft() for session in sessions)
        assert all(session.plan().limit(TokenSource.DRAFT) > 1 for session in sessions)


def test_the_end_of_a_text_is_no_rejection() -> None:
    session = SessionPlanner(Simulation(World()).planner, Sampling(), DRAFT_ALONE, client="")
    for _ in range(50):
        plan = session.plan()
        whole = round_of(plan.limit(TokenSource.DRAFT), plan.limit(TokenSource.DRAFT))
        session.observe(plan, replace(whole, commit=whole.commit.cut(1, FinishReason.EOS)))
    assert accepted_by(session).survival(6)[5] > 0.9


def test_a_fault_keeps_a_session_out_of_the_choice_and_windows_going() -> None:
    planner = Simulation(World()).planner
    sessions = [SessionPlanner(planner, Sampling(), DRAFT_ALONE, client="") for _ in range(2)]
    for _ in range(40):
        for session, fault in zip(sessions, ("", "DRAFT_CONTEXT_EXCEEDED"), strict=True):
            plan = session.plan()
            k = 0 if fault else plan.limit(TokenSource.DRAFT)
            round_ = round_of(k, k)
            session.observe(plan, replace(round_, proposal=drafted((), fault=fault)) if fault else round_)
    assert planner.num_rounds == 80
    assert sessions[0].plan().limit(TokenSource.DRAFT) > 4
    assert sessions[1].has_fault


@pytest.mark.parametrize("cause", ["retried", "fault", "catching up"])
def test_waiting_for_a_worker_teaches_no_costs(cause: str) -> None:
    planner = Simulation(World()).planner
    session = SessionPlanner(planner, Sampling(), given_k(4), client="")
    before = planner.costs.seconds(1, 4)
    slow = round_of(4, 4, seconds=5.0, num_new=200 if cause == "catching up" else 1)
    if cause == "retried":
        slow = replace(slow, verdict=replace(slow.verdict, was_retried=True))
    elif cause == "fault":
        slow = replace(slow, proposal=drafted((), fault="DRAFT_LATE"))
    for _ in range(20):
        session.observe(session.plan(), slow)
    assert planner.costs.seconds(1, 4) == before
    for _ in range(20):
        session.observe(session.plan(), round_of(4, 4, seconds=5.0))
    assert planner.costs.seconds(1, 4) > before


def round_of(k: int, num_accepted: int, *, num_new: int = 1, seconds: float = 0.03) -> Round:
    exchange = Exchange(compute_seconds=seconds / 3, num_tokens=num_new)
    return Round(
        drafted([1] * k, exchange=exchange if k else Exchange()),
        Verdict(num_accepted, 1, exchange=Exchange(compute_seconds=seconds / 3, step_tokens=k + 1)),
        Commit([1] * (num_accepted + 1), num_accepted),
        0.0,
        seconds,
    )


LOOKUP_WORLDS = {
    "a draft and matches": World(matches=0.5, lookup=0.9),
    "matches that are wrong": World(matches=0.7, lookup=0.05),
    "random draft, good matches": World(lambda _: 0.02, matches=0.6, lookup=0.9),
    "rare matches": World(matches=0.05, lookup=0.6),
}


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("name", LOOKUP_WORLDS)
def test_looking_up_is_near_the_better_source_or_beats_it(name: str, at_once: int) -> None:
    """And where no match is right, it costs next to nothing, once some sessions have shown it."""
    world = LOOKUP_WORLDS[name]

    def rate(world: World, sources: Sources) -> float:
        """The mean of some random worlds: in one of them, luck decides which source is used for long."""
        rates = []
        for seed in range(3):
            simulation = Simulation(world, seed=seed)
            simulation.run(num_sessions=8, at_once=at_once, tokens=96, sources=sources)
            rates.append(simulation.run(num_sessions=16, at_once=at_once, tokens=96, sources=sources))
        return fmean(rates)

    model = rate(replace(world, matches=0.0), Sources())
    lookup = rate(world, LOOKUP_ALONE)
    target_only = rate(world, Sources((), 0))
    both = rate(world, Sources())
    print(f"{both / model:.3f} of the model, {both / lookup:.3f} of look-up, {lookup / target_only:.3f} of the target")
    assert both >= 0.88 * max(model, lookup)
    assert lookup >= 0.97 * target_only
    if world.lookup > 0.8:
        assert lookup > 1.3 * target_only


def test_matches_that_become_right_are_used_again() -> None:
    simulation = Simulation(World(lambda _: 0.02, matches=1.0, lookup=0.0))
    simulation.run(num_sessions=8, at_once=1, tokens=96, sources=LOOKUP_ALONE)
    before = simulation.run(num_sessions=4, at_once=1, tokens=96, sources=LOOKUP_ALONE)
    simulation.world = replace(simulation.world, lookup=0.95)
    simulation.run(num_sessions=32, at_once=1, tokens=96, sources=LOOKUP_ALONE)
    assert simulation.run(num_sessions=4, at_once=1, tokens=96, sources=LOOKUP_ALONE) > 2 * before


def test_without_a_draft_model_the_target_decodes_and_looks_up() -> None:
    costs = StepCosts({1: {1: 0.02, 8: 0.022}})
    session = SessionPlanner(Planner(RoundCosts(lambda: costs, lambda: None)), Sampling(), LOOKUP_ALONE, client="")
    assert not session.will_draft()
    assert session.plan() == Plan()
    assert session.plan([Match(TokenSource.LOOKUP, [1] * 8, 8)]).limit(TokenSource.LOOKUP) > 0


def test_before_the_target_has_come_nothing_is_expected() -> None:
    planner = Planner(RoundCosts(lambda: None, lambda: None))
    session = SessionPlanner(planner, Sampling(), client="")
    assert not session.will_draft()
    plan = session.plan()
    assert plan == Plan({TokenSource.DRAFT: 1}), "the Drafter says why there is no draft"
    assert session.observe(plan, round_of(1, 1)) == 0
    assert planner.seconds_per_token(3) == 0


def test_more_sessions_are_expected_to_take_longer_for_a_token_each() -> None:
    simulation = Simulation(World())
    for at_once in (1, 4, 16):
        rate = simulation.run(num_sessions=4 * at_once, at_once=at_once, tokens=128)
        assert simulation.planner.seconds_per_token(at_once) == pytest.approx(at_once / rate, rel=0.3)
    by_sessions = [simulation.planner.seconds_per_token(n) for n in (1, 4, 16, 64)]
    assert by_sessions == sorted(by_sessions)


def test_costs_are_computed_once_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission asks for many numbers of sessions after each round, and a match has many lengths."""
    simulation = Simulation(World())
    simulation.run(num_sessions=4, at_once=1, tokens=64)
    planner = simulation.planner
    session = SessionPlanner(planner, Sampling(), client="")
    match = Match(TokenSource.LOOKUP, [1] * MAX_NUM_DRAFT_TOKENS, 8)
    first = session.plan([match]), [planner.seconds_per_token(n) for n in range(1, 65)]

    def seconds(*_: object) -> float:
        raise AssertionError("the costs of this window are known")

    monkeypatch.setattr(planner.costs, "seconds", seconds)
    assert (session.plan([match]), [planner.seconds_per_token(n) for n in range(1, 65)]) == first

"""The planner: against every fixed k in simulated worlds, and what it learns from whom."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import mean
from unittest import mock

import pytest

from coordinator.core import Commit, Exchange, Match, Plan, Round, Verdict
from coordinator.planner import planner as planner_module
from coordinator.planner.acceptance import PooledAcceptance, SessionAcceptance
from coordinator.planner.policy import choose_k
from coordinator.sources import Sources
from specd.sampling import Acceptance, Sampling
from specd.vocabulary import FinishReason, TokenSource
from tests.unit.fake_workers import drafted
from tests.unit.simulation import Simulation, World

WORLDS = {
    "good draft": World(),
    "random draft": World(lambda _: 0.02),
    "slow draft": World(draft=lambda _, k: 0.010 * k),
    "draft is the target": World(lambda _: 0.97, draft=lambda _, k: 0.021 * k),
    "half of the texts suit": World(lambda i: 0.9 if i % 2 else 0.1),
    "draft 5 ms away": World(wire=0.010),
    "confidence says nothing": World(informative=False),
    "calibrated while busy": World(target_bias=1.5, draft_bias=0.7),
    "workers compete for cores": World(contention=1.3),
}


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("name", WORLDS)
def test_tokens_per_second_are_near_those_of_the_best_fixed_k(name: str, at_once: int) -> None:
    def rate(k: int | None) -> float:
        sources = Sources((TokenSource.DRAFT,), k)
        return Simulation(WORLDS[name]).run(num_sessions=16, at_once=at_once, tokens=96, sources=sources)

    target_only = rate(0)
    best = max(target_only, *map(rate, (1, 3, 6)))
    adaptive = rate(None)
    print(f"{adaptive / best:.3f} of the best k, {adaptive / target_only:.3f} of the target alone")
    assert adaptive >= 0.9 * best
    assert adaptive >= 0.97 * target_only


def test_what_each_proposal_takes_besides_its_tokens_makes_them_no_dearer() -> None:
    """Calibration, which proposes again and again, does not see it; taken for a factor, it made proposals too short."""
    world = World(lambda _: 0.85, draft=lambda _, k: 0.0011 * k, cold_seconds=0.004, informative=False)
    simulation = Simulation(replace(world, verify=lambda n, w: 0.008 + 0.006 * math.ceil(n * w / 4)))
    simulation.run(num_sessions=16, at_once=1, tokens=128)
    costs = simulation.planner.cost_model.costs(1)
    assert costs is not None
    for k in (1, 3, 7, 11):
        assert costs.draft[k] == pytest.approx(0.004 + 0.0011 * k, rel=0.05)


@pytest.mark.parametrize("wire", [0.0005, 0.010])
def test_predicted_tokens_per_second_come_true_where_proposals_end_early(wire: float) -> None:
    """An early end is judged also by fewer accepted tokens, not only by fewer seconds: k was chosen too large."""
    simulation = Simulation(World(wire=wire, verify=lambda n, w: 0.010 + 0.006 * math.ceil(n * w / 4)))
    simulation.run(num_sessions=32, at_once=1, tokens=128)
    with mock.patch.object(planner_module, "choose_k", wraps=choose_k) as choosing:
        predicted: list[float] = []
        choosing.side_effect = lambda *args: (predicted.append((chosen := choose_k(*args))[1]), chosen)[1]
        actual = simulation.run(num_sessions=32, at_once=1, tokens=128)
    print(f"predicted {mean(predicted):.1f}, actual {actual:.1f}")
    assert mean(predicted) == pytest.approx(actual, rel=0.1)


def test_drafting_resumes_when_the_draft_becomes_good() -> None:
    """Probes find it out: without them, a draft that was given up is never asked again."""
    good = False
    simulation = Simulation(World(lambda _: 0.9 if good else 0.02))
    bad_rate = simulation.run(num_sessions=8, at_once=1, tokens=256)
    good = True
    simulation.run(num_sessions=120, at_once=1, tokens=256)
    assert simulation.run(num_sessions=8, at_once=1, tokens=256) > 1.5 * bad_rate


def test_a_stalled_session_does_not_count_as_active() -> None:
    simulation = Simulation(World())
    stalled = simulation.planner.begin(Sampling(), client="")
    stalled.plan()
    assert len(simulation.planner.active()) == 1
    simulation.run(num_sessions=1, at_once=1, tokens=400)
    running = simulation.planner.begin(Sampling(), client="")
    running.plan()
    assert len(simulation.planner.active()) == 1
    stalled.plan()  # its client reads again
    assert len(simulation.planner.active()) == 2


def test_a_paused_session_does_not_count_as_active() -> None:
    planner, is_paused = Simulation(World()).planner, True
    planner.begin(Sampling(), is_paused=lambda: is_paused, client="").plan()
    assert planner.active() == []
    is_paused = False
    assert len(planner.active()) == 1, "before it plans again"


def test_a_session_that_ended_does_not_count_as_active() -> None:
    simulation = Simulation(World())
    for _ in range(3):
        simulation.planner.begin(Sampling(), client="").close()
    assert simulation.planner.active() == []


def test_stalled_sessions_get_no_share_of_the_batch() -> None:
    planner = Simulation(World()).planner
    for stalled in [planner.begin(Sampling(), client="") for _ in range(6)]:
        stalled.observe(stalled.plan(), round_of(4, 0))
    planner.num_rounds += 10_000
    running = [planner.begin(Sampling(), client="") for _ in range(2)]
    for session in running:
        session.plan()
    window = planner.window()
    assert window is not None
    assert set(window.ks) == set(running)


def test_the_end_of_a_text_is_no_rejection() -> None:
    session = Simulation(World()).planner.begin(Sampling(), client="")
    for _ in range(50):
        plan = session.plan()
        whole = round_of(6, 6)
        session.observe(plan, replace(whole, commit=whole.commit.cut(3, FinishReason.EOS)))
    accepted = session.acceptance.accepted()
    assert accepted[5] > 0.9


def test_faults_keep_a_session_out_of_the_share_and_windows_going() -> None:
    planner = Simulation(World()).planner
    sessions = [planner.begin(Sampling(), client="") for _ in range(2)]
    for _ in range(40):
        for session, fault in zip(sessions, ("", "DRAFT_CONTEXT_EXCEEDED"), strict=True):
            plan = session.plan()
            k = 0 if fault else plan.limit(TokenSource.DRAFT)
            round_ = round_of(k, k)
            session.observe(plan, replace(round_, proposal=drafted((), fault=fault)) if fault else round_)
    assert planner.num_rounds == 80
    assert sessions[0].plan().limit(TokenSource.DRAFT) > 4
    assert sessions[1] not in planner.window().ks  # type: ignore[union-attr]


@pytest.mark.parametrize("cause", ["retried", "fault"])
def test_waiting_for_a_worker_is_no_overhead(cause: str) -> None:
    planner = Simulation(World()).planner
    session = planner.begin(Sampling(), Sources((TokenSource.DRAFT,), 4), client="")
    session.plan()
    before = planner.cost_model.costs(1)
    assert before is not None
    slow = round_of(0, 0, seconds=5.0)
    if cause == "retried":
        slow = replace(slow, verdict=replace(slow.verdict, was_retried=True))
    else:
        slow = replace(slow, proposal=drafted((), fault="DRAFT_LATE"))
    session.observe(session.plan(), slow)
    after = planner.cost_model.costs(1)
    assert after is not None
    assert after.round_overhead == before.round_overhead


def round_of(k: int, num_accepted: int, *, num_new: int = 1, seconds: float = 0.03) -> Round:
    exchange = Exchange(compute_seconds=seconds / 3, num_tokens=num_new)
    return Round(
        drafted([1] * k, exchange=exchange if k else Exchange()),
        Verdict(num_accepted, 1, exchange=Exchange(compute_seconds=seconds / 3, step_tokens=k + 1)),
        Commit([1] * (num_accepted + 1), num_accepted),
        0.0,
        seconds,
    )


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
        session = simulation.planner.begin(Sampling(), client="")
        session.close()
        return session.acceptance.accepted()

    before = accepted()
    biased = simulation.planner.begin(sampling, client="")
    own = biased.acceptance.accepted()
    for _ in range(50):
        biased.observe(biased.plan(), round_of(4, 0))
    assert biased.acceptance.accepted()[0] < own[0]  # it learns for itself
    assert accepted() == before
    biased.close()
    typical = simulation.planner.begin(Sampling(), client="")
    for _ in range(50):
        typical.observe(typical.plan(), round_of(4, 0))
    assert accepted() < before


def test_kinds_of_sampling_are_learnt_apart() -> None:
    simulation = Simulation(World())
    greedy = simulation.planner.begin(Sampling(), client="")
    others = [Sampling(temperature=1.0), Sampling(acceptance=Acceptance.REJECTION)]
    before = [simulation.planner.begin(sampling, client="").acceptance.accepted() for sampling in others]
    for _ in range(50):
        greedy.observe(greedy.plan(), round_of(4, 0))
    assert [simulation.planner.begin(sampling, client="").acceptance.accepted() for sampling in others] == before


def test_a_round_in_which_a_worker_catches_up_teaches_no_costs() -> None:
    """A draft that was not asked for long gets many tokens: its time says nothing about a proposal."""
    planner = Simulation(World()).planner
    session = planner.begin(Sampling(), Sources((TokenSource.DRAFT,), 4), client="")
    session.plan()
    before = planner.cost_model.costs(1)
    for _ in range(20):
        session.observe(session.plan(), round_of(4, 4, num_new=200, seconds=3.0))
    assert planner.cost_model.costs(1) == before
    session.observe(session.plan(), round_of(4, 4, seconds=3.0))
    assert planner.cost_model.costs(1) != before


def test_a_fixed_k_is_planned_as_it_is() -> None:
    session = Simulation(World(lambda _: 0.02)).planner.begin(Sampling(), Sources((TokenSource.DRAFT,), 7), client="")
    for _ in range(100):
        plan = session.plan()
        assert (plan.limit(TokenSource.DRAFT), list(plan.min_confidences)) == (7, [])
        session.observe(plan, round_of(7, 0))


@pytest.mark.parametrize("p", [0.05, 0.5, 0.95])
def test_estimates_converge_to_a_sessions_own_acceptance(p: float) -> None:
    rng, session = random.Random(1), SessionAcceptance(PooledAcceptance())
    estimates = []
    for _ in range(600):
        accepted = [rng.random() < p for _ in range(4)]
        session.add(4, (), 4, next((i for i, ok in enumerate(accepted) if not ok), 4))
        estimates.append(session.accepted()[:4])
    for i, estimate in enumerate(zip(*estimates[200:], strict=True)):
        assert mean(estimate) == pytest.approx(p ** (i + 1), abs=0.05)


def test_a_session_is_told_from_the_pool_within_some_rounds() -> None:
    pool = PooledAcceptance()
    for _ in range(30):
        good = SessionAcceptance(pool)
        for _ in range(10):
            good.add(4, (), 4, 4)
        good.close()
    bad = SessionAcceptance(pool)
    assert bad.accepted()[0] > 0.9
    for _ in range(12):
        bad.add(4, (), 4, 0)
    assert bad.accepted()[0] < 0.5


def test_one_long_session_does_not_speak_for_all() -> None:
    pool = PooledAcceptance()
    before = SessionAcceptance(pool).accepted()[0]
    long = SessionAcceptance(pool)
    for _ in range(1000):
        long.add(4, (), 4, 0)
    long.close()
    assert long.accepted()[0] < 0.1
    assert SessionAcceptance(pool).accepted()[0] > 0.6 * before


@pytest.mark.parametrize("true_exponent", [0.5, 1.0, 2.0])
def test_confidence_is_learnt_to_stand_for_acceptance(true_exponent: float) -> None:
    rng, pool = random.Random(1), PooledAcceptance()
    learnt = []
    for _ in range(4000):
        confidences = [rng.uniform(0.5, 1.0) for _ in range(4)]
        accepted = [rng.random() < confidence**true_exponent for confidence in confidences]
        pool.add_confidences(confidences, next((i for i, ok in enumerate(accepted) if not ok), 4))
        learnt.append(pool.confidence(0.5**true_exponent))
    assert mean(learnt[1000:]) == pytest.approx(0.5, abs=0.05)


LOOKUP_ALONE = Sources((TokenSource.LOOKUP,))
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
        simulation = Simulation(world)
        simulation.run(num_sessions=8, at_once=at_once, tokens=96, sources=sources)
        return simulation.run(num_sessions=16, at_once=at_once, tokens=96, sources=sources)

    model = rate(replace(world, matches=0.0), Sources())
    lookup = rate(world, LOOKUP_ALONE)
    target_only = rate(world, Sources((), 0))
    both = rate(world, Sources())
    print(f"{both / model:.3f} of the model, {both / lookup:.3f} of look-up, {lookup / target_only:.3f} of the target")
    assert both >= 0.95 * max(model, lookup)
    assert lookup >= 0.97 * target_only
    if world.lookup > 0.8:
        assert lookup > 1.3 * target_only


def test_matches_that_become_right_are_used_again() -> None:
    simulation = Simulation(World(lambda _: 0.02, matches=1.0, lookup=0.0))
    simulation.run(num_sessions=8, at_once=1, tokens=96, sources=LOOKUP_ALONE)
    before = simulation.run(num_sessions=4, at_once=1, tokens=96, sources=LOOKUP_ALONE)
    simulation.world = replace(simulation.world, lookup=0.95)
    simulation.run(num_sessions=16, at_once=1, tokens=96, sources=LOOKUP_ALONE)
    assert simulation.run(num_sessions=4, at_once=1, tokens=96, sources=LOOKUP_ALONE) > 2 * before


def test_without_a_draft_model_the_target_decodes_and_looks_up() -> None:
    planner = Simulation(World()).planner
    planner.cost_model._draft = lambda: None
    session = planner.begin(Sampling(), LOOKUP_ALONE, client="")
    assert not session.will_draft()
    assert session.plan().limit(TokenSource.DRAFT) == 0
    assert session.plan([Match(TokenSource.LOOKUP, [1] * 8, 8)]).limit(TokenSource.LOOKUP) > 0


def test_a_given_k_of_look_up_is_planned_as_it_is() -> None:
    session = Simulation(World()).planner.begin(Sampling(), Sources((TokenSource.LOOKUP,), 5), client="")
    assert session.plan([Match(TokenSource.LOOKUP, [1] * 32, 3)]) == Plan({TokenSource.LOOKUP: 5}, most=5)

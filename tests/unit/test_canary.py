"""A draft on trial serves its share of the sessions, and teaches nothing about the present one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.canary.canary import Canary
from coordinator.canary.canary_planner import CanaryPlanner
from coordinator.canary.choice import CanaryChoice
from coordinator.canary.judgement import MOST_ROUNDS, ROUNDS_OF_A_SESSION, CanaryState
from coordinator.core import Match, Part, Plan, Proposal, Round
from coordinator.planner.planner import Planner
from coordinator.planner.round_costs import RoundCosts
from coordinator.planner.running import Running
from coordinator.planner.session_planner import SessionPlanner
from coordinator.proposals.drafter import Drafter, DraftStream
from coordinator.proposals.proposer import Proposer
from coordinator.sources import Sources
from coordinator.workers.workers import Workers
from specd.sampling import Sampling
from specd.step_costs import StepCosts
from specd.vocabulary import TokenSource
from tests.unit.fake_workers import (
    END_TOKEN,
    MODEL,
    SETUP,
    VOCABULARY_SIZE,
    FakeDraft,
    FakeTarget,
    decode_with_target_alone,
    make_session,
    next_token,
    plan_of,
    run_planned,
)
from tests.unit.test_planner import round_of

COSTS = StepCosts({1: {k: 0.0016 * k for k in (1, 2, 4, 8)}})
TARGET = StepCosts({1: {1: 0.020, 9: 0.026, 33: 0.050}})
DRAFTS = Sources((TokenSource.DRAFT,))


def wrong_token(token_ids: Sequence[int]) -> int:
    return (next_token(token_ids) + 1) % VOCABULARY_SIZE


class World:
    """A present draft, a canary, and a planner for each."""

    def __init__(self, share: float = 0.5) -> None:
        self.workers = [FakeDraft(next_token, []), FakeDraft(wrong_token, [])]
        for worker in self.workers:
            worker.step_costs = COSTS
        present, canary = (Workers[DraftStream]([worker]) for worker in self.workers)
        self.canary = Canary(present, canary, share)
        running = Running()
        self.planners = [Planner(RoundCosts(lambda: TARGET, lambda: COSTS), running) for _ in self.workers]

    def begin(self, *, has_canary: bool) -> Served:
        """Return the next session that begins with this draft."""
        while (served := Served(self)).choice.is_canary != has_canary:
            assert self.canary.is_on_trial
            served.close()
        return served


class Served:
    """A session, with its choice and its planner."""

    def __init__(self, world: World) -> None:
        self.choice = choice = CanaryChoice(world.canary, "greedy")
        self.session = SessionPlanner(world.planners[choice.is_canary], Sampling(), DRAFTS, client="someone")
        self.planner = CanaryPlanner(self.session, choice, lambda: world.planners[choice.is_canary])
        self.close = self.session.close

    def run(self, *, accepted: int, fault: str = "") -> bool:
        """Run a round in which the target accepts at most this many tokens. Return whether the canary proposed."""
        plan = self.planner.plan([])
        is_canary, k = self.choice.is_canary, plan.limit(TokenSource.DRAFT)
        round_ = round_of(0 if fault else k, 0 if fault else min(accepted, k))
        if fault:
            round_ = replace(round_, proposal=Proposal((Part(TokenSource.DRAFT, fault=fault),)))
        self.planner.observe(plan, round_)
        return is_canary


@given(share=st.floats(0.01, 0.5), number=st.integers(1, 2000))
def test_the_canary_begins_its_share_of_the_sessions(share: float, number: int) -> None:
    canary = World(share).canary
    assert abs(sum(canary.assign() for _ in range(number)) - share * number) < 1.5


def test_no_rhythm_of_requests_gives_the_canary_always_the_same_client() -> None:
    canary = World(0.1).canary
    clients = {number % 10 for number in range(1000) if canary.assign()}
    assert clients == set(range(10))


def test_a_session_has_the_canary_in_its_first_rounds_and_then_the_present_draft() -> None:
    world = World()
    served, other = world.begin(has_canary=True), world.begin(has_canary=False)
    seen = [served.run(accepted=3) for _ in range(30)]
    assert seen == [True] * ROUNDS_OF_A_SESSION + [False] * (30 - ROUNDS_OF_A_SESSION)
    assert not any(other.run(accepted=3) for _ in range(30))
    assert world.canary.judgement.num_rounds == ROUNDS_OF_A_SESSION


def test_without_the_canary_the_present_draft_proposes_and_without_that_the_canary() -> None:
    world = World()
    canary, present = world.begin(has_canary=True), world.begin(has_canary=False)
    world.workers[True].model = None
    assert not canary.run(accepted=3)
    assert not CanaryChoice(world.canary, "greedy").is_canary
    world.workers[True].model, world.workers[False].model = MODEL, None
    assert canary.run(accepted=3)
    assert present.run(accepted=3)
    assert world.canary.judgement.num_rounds == 1, "of the session that began with it"
    world.workers[True].model = None
    assert not present.run(accepted=3)


def test_a_canary_that_never_comes_serves_no_session_and_is_not_judged() -> None:
    world = World()
    world.workers[True].model = None
    for _ in range(20):
        served = Served(world)
        assert not any(served.run(accepted=3) for _ in range(20))
    assert (world.canary.state, world.canary.judgement.num_rounds) == (CanaryState.UNDECIDED, 0)


def test_a_session_that_the_canary_fails_leaves_it_and_counts_in_full() -> None:
    world = World()
    served = world.begin(has_canary=True)
    assert served.run(accepted=3)
    assert served.run(accepted=0, fault="DRAFT_LATE")
    assert not served.run(accepted=3)
    assert world.canary.judgement.num_rounds == ROUNDS_OF_A_SESSION


@pytest.mark.parametrize(("present", "canary", "state"), [(1, 5, CanaryState.KEPT), (5, 1, CanaryState.TAKEN_BACK)])
def test_the_better_draft_then_serves_all_sessions(present: int, canary: int, state: CanaryState) -> None:
    world, taken_back = World(), []
    world.canary.on_taken_back = lambda: taken_back.append(world.canary.state)
    running = [world.begin(has_canary=has_canary) for has_canary in (False, True)]
    while world.canary.state is CanaryState.UNDECIDED:
        served = Served(world)
        for number in range(9):
            served.run(accepted=(canary if served.choice.is_canary else present) + number % 2)
        served.close()
    assert world.canary.state is state
    assert world.canary.judgement.num_rounds <= MOST_ROUNDS
    is_kept = state is CanaryState.KEPT
    assert [each.run(accepted=1) for each in (*running, Served(world))] == [is_kept] * 3
    assert world.canary.leads == is_kept
    assert taken_back == [] if is_kept else [CanaryState.TAKEN_BACK]
    # Where the better one is away, a slow present draft is better than none, and one that was taken back is not.
    world.workers[is_kept].model = None
    assert [each.run(accepted=1) for each in running] == [False, False]


def test_neither_draft_teaches_the_planner_of_the_other_one() -> None:
    """A client's next session with the present draft plans as if there had been no canary."""
    world, alone = World(), World()
    for _ in range(4):
        for has_canary in (False, True):
            served = world.begin(has_canary=has_canary)
            for _ in range(10):
                served.run(accepted=0 if has_canary else 6)
            served.close()
        served = alone.begin(has_canary=False)
        for _ in range(10):
            served.run(accepted=6)
        served.close()
    present, canary = (planner.learnt()["clients"] for planner in world.planners)
    assert present == alone.planners[False].learnt()["clients"]
    assert present != canary
    plans = [world.begin(has_canary=has_canary).planner.plan([]) for has_canary in (False, True)]
    assert plans[False].limit(TokenSource.DRAFT) > plans[True].limit(TokenSource.DRAFT)


def test_sessions_of_both_drafts_share_the_steps_of_the_target() -> None:
    world = World()
    served = [world.begin(has_canary=has_canary) for has_canary in (False, True)]
    for each in served:
        each.planner.plan([])
    windows = [planner.window() for planner in world.planners]
    assert [window is not None and window.num_active for window in windows] == [2, 2]


class Flipping:
    """A planner that changes the draft before each round, as often as a decision never does."""

    def __init__(self, choice: CanaryChoice, turns: Sequence[bool]) -> None:
        self._choice, self._turns = choice, list(turns)

    def will_draft(self) -> bool:
        return True

    def plan(self, matches: Sequence[Match]) -> Plan:
        self._choice.is_canary = self._turns.pop() if self._turns else False
        return plan_of(3)

    def ahead(self) -> Plan:
        return Plan()

    def observe(self, plan: Plan, round_: Round) -> float:
        return 0.0


@given(turns=st.lists(st.booleans(), max_size=30), prompt=st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_a_text_is_the_targets_own_however_often_its_draft_changes(turns: list[bool], prompt: list[int]) -> None:
    world = World()
    choice = CanaryChoice(world.canary, "greedy")
    drafter = Drafter(choice.drafts, SETUP, timeout_seconds=1.0, clock=lambda: 0.0)
    session = make_session(prompt, 30, END_TOKEN)
    rounds, _ = run_planned(session, Flipping(choice, turns), Proposer([drafter]), FakeTarget([]))
    assert session.token_ids[len(prompt) :] == decode_with_target_alone(prompt, 30)
    assert not any(round_.proposal.drafted.fault for round_ in rounds)
    assert [worker.num_open for worker in world.workers] == [0, 0]

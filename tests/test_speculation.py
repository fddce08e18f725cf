"""How far to speculate, decided online: simulated models and sessions, against every fixed k in hindsight."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from math import prod

import pytest

from coordinator.plan import Plan
from coordinator.round import Exchange, Proposal, Round, Verdict
from coordinator.session import Session
from coordinator.speculation import _FIRST_CONTROL_ROUNDS, SessionSpeculation, Speculation
from specd.sampling import Acceptance, Sampling
from specd.step_costs import StepCosts
from tests.simulated_load import MAX_TOKENS, Guess, Link, proposal_length

# Milliseconds, as measured on two cores.
VERIFY = {1: 18, 2: 20, 3: 22, 4: 21, 5: 27, 6: 28, 8: 23, 9: 30, 12: 32, 16: 36, 24: 44, 33: 55}
DRAFT = {1: 1.6, 2: 1.7}
WIRE_SECONDS = 0.0006  # to a worker and back
OWN_SECONDS = 0.0004  # of the coordinator
NOISE = 0.1
GREEDY = Sampling()
FIXED_KS = (0, 1, 2, 3, 5, 6, 7, 8, 11)


def good(rng: random.Random, place: int) -> tuple[float, float]:
    """Mostly easy text."""
    if rng.random() < 0.75:
        confidence = rng.uniform(0.93, 1.0)
        return confidence, confidence
    confidence = rng.uniform(0.5, 0.95)
    return confidence, confidence**2


def middling(rng: random.Random, place: int) -> tuple[float, float]:
    confidence = rng.uniform(0.5, 1.0)
    return confidence, confidence**1.5


def in_stretches(rng: random.Random, place: int) -> tuple[float, float]:
    """Easy text and difficult text, a dozen tokens each."""
    if random.Random(place // 12).random() < 0.5:
        confidence = rng.uniform(0.97, 1.0)
        return confidence, confidence
    confidence = rng.uniform(0.5, 0.8)
    return confidence, confidence**2


def uninformative(rng: random.Random, place: int) -> tuple[float, float]:
    """Confidence that says nothing."""
    return rng.uniform(0.5, 1.0), 0.75


def certain(rng: random.Random, place: int) -> tuple[float, float]:
    return 1.0, 1.0


def hopeless(rng: random.Random, place: int) -> tuple[float, float]:
    return rng.uniform(0.5, 1.0), 0.01


@dataclass(frozen=True)
class World:
    """Two models; what they take and say can change when so many tokens have been decoded."""

    guess: Guess = good
    draft: Mapping[int, float] = field(default_factory=lambda: DRAFT)
    verify: Mapping[int, float] = field(default_factory=lambda: VERIFY)
    sampling: Sampling = GREEDY
    wire_seconds: float = WIRE_SECONDS
    # After the change.
    changes_at: int = 10**9
    later_guess: Guess | None = None
    later_draft: Mapping[int, float] | None = None
    # By how much a verify takes longer while the draft goes ahead.
    slowdown: float = 0.0
    # What the calibration measured, over what steps really take; and what the target's single tokens take besides.
    miscalibrated: float = 1.0
    miscalibrated_alone: float = 1.0

    @property
    def calibrated(self) -> Mapping[int, float]:
        """What the calibration said of the target."""
        return {**self.verify, 1: self.verify[1] * self.miscalibrated_alone}

    def draft_at(self, num_tokens: int) -> Mapping[int, float]:
        return self.draft if self.later_draft is None or num_tokens < self.changes_at else self.later_draft

    def guess_at(self, num_tokens: int) -> Guess:
        return self.guess if self.later_guess is None or num_tokens < self.changes_at else self.later_guess


def costs_of(milliseconds: Mapping[int, float], factor: float = 1.0) -> StepCosts:
    return StepCosts({1: {width: took * factor / 1000 for width, took in milliseconds.items()}})


@dataclass
class Ran:
    """What became of a simulation."""

    seconds: float = 0.0
    tokens: int = 0
    rounds: list[tuple[Plan, Round]] = field(default_factory=list)

    @property
    def placed(self) -> Iterator[tuple[int, int, float]]:
        """Where the rounds begin, how many tokens they gave, and what they took."""
        place = 0
        for _, round_ in self.rounds:
            yield place, len(round_.commit.token_ids), round_.seconds
            place += len(round_.commit.token_ids)


class Simulation:
    """Decodes sessions one after another; what happens at a position does not depend on who decides about k."""

    def __init__(self, world: World, *, draft_ahead: str = "never", seed: int = 0) -> None:
        self.world = world
        self.now = 1000.0
        self.noise = random.Random(seed)
        self.text = random.Random(seed + 1)
        self.guesses: list[tuple[float, bool]] = []
        worker = costs_of(world.verify)  # which pads to what is cheaper
        self.verify_seconds = [worker.seconds(1, worker.cheapest_width(1, k + 1)) for k in range(33)]
        self.target = Link(costs_of(world.calibrated, world.miscalibrated))
        self.draft = Link(costs_of(world.draft, world.miscalibrated))
        self.speculation = Speculation(self.target, self.draft, draft_ahead=draft_ahead, clock=lambda: self.now)
        self.ready: list[float] | None = None  # the confidences of the next proposal, if it is there already
        self.ran = Ran()

    def run(self, num_tokens: int, *, k: int | None = None) -> Ran:
        """Decode up to so many tokens in all, with k draft tokens each round if it is given."""
        while self.ran.tokens < num_tokens:
            session = Session("s", [0], MAX_TOKENS, frozenset())
            speculation = self.speculation.begin(self.world.sampling, k)
            self.ready = None
            while session.finish_reason is None:
                self.decode_round(session, speculation)
            speculation.close()
        return self.ran

    def decode_round(self, session: Session, speculation: SessionSpeculation) -> None:
        """Take a turn of the loop in coordinator/decoding.py."""
        started_at, is_first = self.now, session.num_generated == 0
        plan = session.bound(speculation.plan())
        proposal = self.propose(plan)
        went_ahead = plan.num_ahead_tokens > 0 and prod(proposal.confidences) >= plan.min_ahead_confidence
        verdict = self.verify(proposal, went_ahead)
        self.ready = self.go_ahead(plan, proposal, verdict) if went_ahead else None
        commit = session.commit(proposal.token_ids, verdict.num_accepted, verdict.next_token_id)
        self.now += OWN_SECONDS * self.jitter()
        round_ = Round(proposal, verdict, commit, started_at, self.now)
        if not is_first:
            round_ = speculation.observe(plan, round_)
        self.ran.rounds.append((plan, round_))
        self.ran.tokens += len(commit.token_ids)
        self.ran.seconds += round_.seconds

    def jitter(self) -> float:
        return self.noise.uniform(1 - NOISE, 1 + NOISE)

    def at(self, place: int) -> tuple[float, bool]:
        """Return the draft's confidence in the token at a place, of all that are decoded, and whether it is right."""
        while len(self.guesses) <= place:
            confidence, probability = self.world.guess_at(len(self.guesses))(self.text, len(self.guesses))
            self.guesses.append((confidence, self.text.random() < probability))
        return self.guesses[place]

    def next(self, ahead: int) -> tuple[float, bool]:
        """Return the same of what comes so many tokens on."""
        return self.at(self.ran.tokens + ahead)

    def length(self, plan: Plan, first: int, most: int) -> int:
        """Return where a proposal from a place on ends: a token late, as the draft worker does."""
        return proposal_length((self.next(first + i)[0] for i in range(most)), plan.min_confidences, most)

    def propose(self, plan: Plan) -> Proposal:
        if plan.num_draft_tokens == 0:
            return Proposal([])
        if self.ready is not None:
            confidences = self.ready[: plan.num_draft_tokens]
            return Proposal([1] * len(confidences), confidences=confidences, was_ahead=True)
        length = self.length(plan, 0, plan.num_draft_tokens)
        compute = self.draft_seconds(length, self.ran.tokens) * self.jitter()
        wire = self.world.wire_seconds * self.jitter()
        self.now += compute + wire
        confidences = [self.next(i)[0] for i in range(length)] if plan.min_confidences or plan.num_ahead_tokens else []
        return Proposal(
            [1] * length,
            exchange=Exchange(compute_seconds=compute, wire_seconds=wire),
            confidences=confidences,
        )

    def draft_seconds(self, length: int, place: int) -> float:
        curve = self.world.draft_at(place)
        return (curve[2] + (length - 1) * curve[1]) / 1000

    def verify(self, proposal: Proposal, went_ahead: bool) -> Verdict:
        num_proposed = len(proposal.token_ids)
        compute = self.verify_seconds[num_proposed] * self.jitter()
        if went_ahead:
            compute *= 1 + self.world.slowdown
        wire = self.world.wire_seconds * self.jitter()
        self.now += compute + wire
        accepted = next((i for i in range(num_proposed) if not self.next(i)[1]), num_proposed)
        return Verdict(accepted, 2, exchange=Exchange(compute_seconds=compute, wire_seconds=wire))

    def go_ahead(self, plan: Plan, proposal: Proposal, verdict: Verdict) -> list[float] | None:
        """Return the confidences of the next proposal, if the draft has it by now."""
        length = len(proposal.token_ids)
        confidence, is_right = self.next(length)
        if verdict.num_accepted < length or not is_right:
            return None
        if prod(proposal.confidences) * confidence < plan.min_ahead_confidence:
            return None
        num_ahead = self.length(plan, length + 1, plan.num_ahead_tokens)
        if num_ahead == 0 or self.draft_seconds(num_ahead + 1, self.ran.tokens) > verdict.exchange.compute_seconds:
            return None
        return [self.next(length + 1 + i)[0] for i in range(num_ahead)]


NUM_TOKENS = 4000
SLOW = {1: 18.0, 2: 18.5}
AS_SLOW = {1: 18.6, 2: 19.0}  # as the target
HALFWAY = NUM_TOKENS // 2
PAYS = {
    "good": World(),
    "middling": World(middling),
    "in stretches": World(in_stretches),
    "confidence says nothing": World(uninformative),
    "calibrated in a busy hour": World(miscalibrated=1.5),
    "sampling": World(middling, sampling=Sampling(temperature=1.0, acceptance=Acceptance.REJECTION)),
    "far away": World(middling, wire_seconds=0.015),
    # Where one unlucky stretch makes it look as if it did not pay.
    "far away, with cheap tokens": World(
        middling, verify={width: 4 + width for width in VERIFY}, draft={1: 0.5, 2: 0.5}, wire_seconds=0.02
    ),
    "flat verify": World(verify={width: 20 + 0.1 * width for width in VERIFY}),
}
DOES_NOT_PAY = {
    "hopeless": World(hopeless),
    "slow": World(draft=SLOW),
    "verify linear in tokens": World(verify={width: 18 * width for width in VERIFY}),
    "hopeless, and calibrated in a busy hour": World(hopeless, miscalibrated=1.5),
    "the target itself": World(certain, draft=AS_SLOW),
    "the target itself, whose single tokens were calibrated in a busy second": World(
        certain, draft=AS_SLOW, miscalibrated_alone=1.4
    ),
}
CHANGES = {
    "becomes slow": World(changes_at=HALFWAY, later_draft={1: 21.6, 2: 21.7}),
    "becomes hopeless": World(changes_at=HALFWAY, later_guess=hopeless),
    "becomes good": World(hopeless, changes_at=HALFWAY, later_guess=good),
    "becomes fast": World(draft=SLOW, changes_at=HALFWAY, later_draft=DRAFT),
}
WORLDS = {**PAYS, **DOES_NOT_PAY, **CHANGES}


SEEDS = range(2)


@cache
def fixed_rounds(name: str, k: int, seed: int) -> list[tuple[int, int, float]]:
    """Return rounds with always k draft tokens, and without noise: where they begin, their tokens and seconds."""
    simulation = text(name, seed)
    rounds, place = [], 0
    while place < NUM_TOKENS:
        num_generated = place % MAX_TOKENS
        most = min(k, MAX_TOKENS - num_generated - 1) if num_generated else 0
        seconds = simulation.verify_seconds[most] + simulation.world.wire_seconds + OWN_SECONDS
        if most:
            seconds += simulation.draft_seconds(most, place) + simulation.world.wire_seconds
        accepted = next((i for i in range(most) if not simulation.at(place + i)[1]), most)
        rounds.append((place, accepted + 1, seconds))
        place += accepted + 1
    return rounds


@cache
def text(name: str, seed: int) -> Simulation:
    return Simulation(WORLDS[name], seed=seed)


def rate_between(rounds: Iterable[tuple[int, int, float]], first: int, last: int) -> float:
    """Return tokens per second from a number of tokens to another."""
    chosen = [(num_tokens, seconds) for place, num_tokens, seconds in rounds if first <= place < last]
    return sum(num_tokens for num_tokens, _ in chosen) / sum(seconds for _, seconds in chosen)


def fixed_rate(name: str, k: int, first: int = 0, last: int = NUM_TOKENS) -> float:
    return rate_between(chain.from_iterable(fixed_rounds(name, k, seed) for seed in SEEDS), first, last)


def best_fixed(name: str, first: int = 0, last: int = NUM_TOKENS) -> float:
    return max(fixed_rate(name, k, first, last) for k in FIXED_KS)


@cache
def decided(name: str, seed: int) -> Ran:
    return Simulation(WORLDS[name], seed=seed).run(NUM_TOKENS)


def decided_rate(name: str, first: int = 0, last: int = NUM_TOKENS) -> float:
    return rate_between(chain.from_iterable(decided(name, seed).placed for seed in SEEDS), first, last)


def drafts(ran: Ran) -> list[bool]:
    return [plan.num_draft_tokens > 0 for plan, _ in ran.rounds]


# How fast it is.


@pytest.mark.parametrize("name", PAYS)
def test_it_is_hardly_slower_than_the_best_fixed_k(name: str) -> None:
    assert best_fixed(name) > 1.25 * fixed_rate(name, 0)
    # Where confidence says nothing, ending proposals by it costs a little more.
    least = 0.965 if name == "confidence says nothing" else 0.97
    assert decided_rate(name) > least * best_fixed(name)


@pytest.mark.parametrize(("name", "gain"), [("in stretches", 1.05), ("flat verify", 1.02)])
def test_it_is_faster_than_the_best_fixed_k_where_confidence_tells_when_to_stop(name: str, gain: float) -> None:
    assert decided_rate(name) > gain * best_fixed(name)


@pytest.mark.parametrize("name", DOES_NOT_PAY)
def test_it_is_hardly_slower_than_the_target_alone_where_drafting_does_not_pay(name: str) -> None:
    assert fixed_rate(name, 0) == best_fixed(name)
    assert decided_rate(name) > 0.985 * fixed_rate(name, 0)


@pytest.mark.parametrize(
    ("name", "part"), [("becomes slow", 0.9), ("becomes hopeless", 0.9), ("becomes good", 0.85), ("becomes fast", 0.7)]
)
def test_it_follows_a_change(name: str, part: float) -> None:
    """So much of what the best k for each half gives, with the time that it takes to find out."""
    assert decided_rate(name, 0, HALFWAY) > 0.97 * best_fixed(name, 0, HALFWAY)
    assert decided_rate(name, HALFWAY) > part * best_fixed(name, HALFWAY)
    assert decided_rate(name) > 1.1 * best_fixed(name)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["becomes good", "becomes fast"])
def test_a_draft_that_begins_to_pay_is_found_out(name: str, seed: int) -> None:
    """Within a thousand tokens of the target alone, which at 19 ms are 19 s."""
    ran = decided(name, seed)
    rounds = drafts(ran)
    found = next(i for i in range(19, len(rounds)) if sum(rounds[i - 19 : i + 1]) >= 15)
    place, *_ = [*ran.placed][found]
    assert HALFWAY < place < HALFWAY + 1000


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "num_rounds"), [("becomes slow", 50), ("becomes hopeless", 250)])
def test_a_draft_that_no_longer_pays_is_given_up_soon(name: str, num_rounds: int, seed: int) -> None:
    """With the trials, so many rounds have a proposal after that: in ever fewer of them, and ever shorter ones."""
    ran = decided(name, seed)
    assert (
        sum(is_drafted for (place, *_), is_drafted in zip(ran.placed, drafts(ran), strict=True) if place >= HALFWAY)
        < num_rounds
    )


# Trials.


@pytest.mark.parametrize("name", DOES_NOT_PAY)
def test_what_does_not_pay_is_tried_again_now_and_then(name: str) -> None:
    rounds = drafts(decided(name, 0))
    assert any(rounds[len(rounds) // 2 :])
    assert sum(rounds) < 0.03 * len(rounds)


def test_one_round_in_64_is_the_targets_alone_for_comparison() -> None:
    rounds = decided("good", 0).rounds
    ends = [i for i, (_, round_) in enumerate(rounds) if round_.commit.finish_reason is not None]
    # The first of a session has no proposal, nor one with room for a single token.
    forced = {0, *ends, *(i + 1 for i in ends)}
    controls = [i for i, (plan, _) in enumerate(rounds) if plan.num_draft_tokens == 0 and i not in forced]
    early = len(_FIRST_CONTROL_ROUNDS)
    assert 0.7 < (len(controls) - early) / (len(rounds) / 64) <= 1.0


@pytest.mark.parametrize("k", [0, 1, 4, 32])
@pytest.mark.parametrize("name", ["good", "hopeless", "slow"])
def test_a_k_that_is_given_is_what_every_round_plans(name: str, k: int) -> None:
    simulation = Simulation(WORLDS[name], draft_ahead="auto")
    speculation = simulation.speculation.begin(GREEDY, k)
    assert speculation.will_draft == (k > 0)
    session = Session("s", [0], 10**6, frozenset())
    for _ in range(300):
        assert speculation.plan() == Plan(k)
        simulation.decode_round(session, speculation)


def test_without_a_draft_it_is_left_to_the_drafter_to_say_why() -> None:
    simulation = Simulation(World())
    simulation.draft.step_costs = None
    speculation = simulation.speculation.begin(GREEDY, None)
    plan = speculation.plan()
    assert plan.num_draft_tokens > 0
    assert plan.num_ahead_tokens == 0
    session = Session("s", [0], 10**6, frozenset())
    simulation.decode_round(session, speculation)
    simulation.decode_round(session, speculation)


def test_a_draft_that_comes_later_is_used() -> None:
    simulation = Simulation(World())
    there, simulation.draft.step_costs = simulation.draft.step_costs, None
    simulation.speculation.begin(GREEDY, None).plan()
    simulation.draft.step_costs = there
    assert rate_between(simulation.run(1000).placed, 0, 1000) > 1.5 * fixed_rate("good", 0)


def test_a_round_without_the_draft_it_asked_for_teaches_nothing() -> None:
    simulation = Simulation(World())
    simulation.run(300)
    speculation = simulation.speculation.begin(GREEDY, None)
    plan = speculation.plan()
    before = simulation.target.step_costs.measured, simulation.draft.step_costs.measured
    session = Session("s", [0], MAX_TOKENS, frozenset())
    verdict = Verdict(0, 2, exchange=Exchange(compute_seconds=5.0))
    round_ = Round(Proposal([], fault="DRAFT_LATE"), verdict, session.commit([], 0, 2), 0.0, 10.0)
    assert speculation.observe(plan, round_) is round_
    assert (simulation.target.step_costs.measured, simulation.draft.step_costs.measured) == before


@pytest.mark.parametrize("k", [None, 0, 1, 2, 4, 6])
@pytest.mark.parametrize("name", ["good", "hopeless", "far away"])
def test_what_the_target_alone_takes_is_known_whatever_k_is(name: str, k: int | None) -> None:
    ran = Simulation(WORLDS[name]).run(NUM_TOKENS // 2, k=k)
    known = [round_ for _, round_ in ran.rounds[100:] if round_.target_only_seconds]
    per_token = sum(round_.target_only_seconds for round_ in known) / sum(
        len(round_.commit.token_ids) for round_ in known
    )
    # With a k that is given only the last rounds of sessions are the target's alone: some ten, each 10 % off or less.
    assert per_token == pytest.approx(VERIFY[1] / 1000 + WORLDS[name].wire_seconds + OWN_SECONDS, rel=0.05)


def test_a_session_knows_from_the_first_round_what_others_like_it_have_learnt() -> None:
    simulation = Simulation(World(hopeless))
    simulation.run(2000)
    with closing(simulation.speculation.begin(GREEDY, None)) as alike:
        assert alike.plan().num_draft_tokens == 0
    with closing(simulation.speculation.begin(Sampling(temperature=1.0), None)) as other:
        assert other.plan().num_draft_tokens > 0


# Going ahead.


def speed_up(name: str, slowdown: float = 0.0) -> tuple[float, Ran]:
    """Return how many times as fast it is to go ahead where that seems to pay as never to, and what it was."""
    world = replace(WORLDS[name], slowdown=slowdown)
    never = [decided(name, seed) for seed in SEEDS]
    ahead = [Simulation(world, draft_ahead="auto", seed=seed).run(NUM_TOKENS) for seed in SEEDS]
    assert not any(plan.num_ahead_tokens for ran in never for plan, _ in ran.rounds)
    return sum(ran.seconds for ran in never) / sum(ran.seconds for ran in ahead), ahead[0]


@pytest.mark.parametrize(("name", "gain"), [("good", 1.06), ("middling", 1.02), ("in stretches", 1.03)])
def test_it_goes_ahead_where_that_slows_nothing_down(name: str, gain: float) -> None:
    faster, ran = speed_up(name)
    assert faster > gain
    assert sum(round_.proposal.was_ahead for _, round_ in ran.rounds) > 0.1 * len(ran.rounds)


@pytest.mark.parametrize("slowdown", [0.1, 0.4])
@pytest.mark.parametrize("name", ["good", "middling", "in stretches"])
def test_going_ahead_never_costs_much_whatever_it_slows_down(name: str, slowdown: float) -> None:
    faster, _ = speed_up(name, slowdown)
    assert faster > 0.985


@pytest.mark.parametrize("name", ["good", "middling"])
def test_it_goes_ahead_now_and_then_only_where_that_slows_down_more_than_it_saves(name: str) -> None:
    _, ran = speed_up(name, 0.8)
    settled = ran.rounds[len(ran.rounds) // 2 :]
    went_ahead = [
        plan.num_ahead_tokens > 0 and prod(round_.proposal.confidences) >= plan.min_ahead_confidence
        for plan, round_ in settled
    ]
    assert sum(went_ahead) < 0.05 * len(settled)


def test_it_does_not_go_ahead_for_one_of_several_sessions() -> None:
    simulation = Simulation(World(), draft_ahead="auto")
    other = simulation.speculation.begin(GREEDY, None)
    assert not any(plan.num_ahead_tokens for plan, _ in simulation.run(1000).rounds)
    other.close()
    assert any(plan.num_ahead_tokens for plan, _ in simulation.run(2000).rounds)

"""What rounds of several sessions take without drafts, in comparison, is known from a few of them."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping

import pytest

from coordinator.load_trials import LoadTrials
from coordinator.plan import JointPlan

ROUNDS = 8  # of each session in a stretch
DRAFTING, ALONE = 0.030, 0.010  # seconds that rounds should take


def planned(drafts: bool, tokens: Mapping[Hashable, float], seconds: float) -> JointPlan:
    return JointPlan(dict.fromkeys(tokens, 3 if drafts else 0), tokens, seconds)


class Sessions:
    """Some that take stretch after stretch, whose rounds take so many times as long as they should."""

    def __init__(self, *, drafting: float, alone: float, noise: float = 0.0, usually_drafts: bool = True) -> None:
        self.now = 0.0
        self.trials = LoadTrials(lambda: self.now)
        self.drafting, self.alone, self.noise = drafting, alone, noise
        self.usually_drafts = usually_drafts
        self.was_trial = False
        self.random = random.Random(0)

    def rate(self, drafts: bool) -> float:
        """Return the tokens per second of a session."""
        return 3 / DRAFTING / self.drafting if drafts else 1 / ALONE / self.alone

    def stretch(self, num_sessions: int = 4) -> float:
        """Let a stretch go by; returns what part of the tokens is lost by what is tried in it."""
        self.trials.next_stretch(num_sessions)
        is_trial = self.was_trial = self.trials.is_due
        drafts = self.usually_drafts is not is_trial
        drafting = planned(True, dict.fromkeys(range(num_sessions), 3.0), DRAFTING)
        alone = planned(False, dict.fromkeys(range(num_sessions), 1.0), ALONE)
        expected, other = (drafting, alone) if drafts else (alone, drafting)
        self.trials.expect(expected, instead_of=other if is_trial else None)
        for _ in range(ROUNDS):
            took = expected.seconds * (self.drafting if drafts else self.alone)
            took *= self.random.uniform(1 - self.noise, 1 + self.noise)
            self.now += took
            for i in range(num_sessions):
                self.trials.observe(i, took)
        return 1 - self.rate(drafts) / self.rate(self.usually_drafts)

    def stretches(self, count: int, num_sessions: int = 4) -> float:
        """Let some go by; returns what part of the tokens is lost by trials."""
        begun_at, lost = self.now, 0.0
        for _ in range(count):
            before = self.now
            loss = self.stretch(num_sessions)
            lost += loss * (self.now - before)
        return lost / (self.now - begun_at)


@pytest.mark.parametrize("usually_drafts", [True, False])
@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize(("drafting", "alone"), [(1.0, 1.0), (0.8, 1.2), (1.5, 1.0), (2.0, 1.8)])
@pytest.mark.parametrize("num_sessions", [2, 5, 16])
def test_it_comes_to_how_much_longer_one_takes_than_the_other(
    num_sessions: int, drafting: float, alone: float, noise: float, usually_drafts: bool
) -> None:
    sessions = Sessions(drafting=drafting, alone=alone, noise=noise, usually_drafts=usually_drafts)
    assert sessions.trials.alone == 1.0
    assert sessions.stretches(4000, num_sessions) < 0.01
    assert sessions.trials.alone == pytest.approx(alone / drafting, rel=0.01 + 0.3 * noise)


def test_it_notices_a_change() -> None:
    sessions = Sessions(drafting=1.0, alone=1.0)
    sessions.stretches(200)
    sessions.alone = 1.5
    sessions.stretches(500)
    assert sessions.trials.alone > 1.3


def test_how_busy_the_machine_is_makes_no_difference() -> None:
    sessions = Sessions(drafting=1.0, alone=1.2)
    for _ in range(50):
        sessions.stretches(50)
        sessions.drafting, sessions.alone = sessions.drafting * 1.02, sessions.alone * 1.02
    assert sessions.trials.alone == pytest.approx(1.2, rel=0.03)


def test_what_is_known_of_few_is_not_taken_for_many() -> None:
    sessions = Sessions(drafting=1.0, alone=1.5)
    sessions.stretches(500, 2)
    assert sessions.trials.alone > 1.4
    sessions.trials.next_stretch(8)
    assert sessions.trials.alone == 1.0
    sessions.trials.next_stretch(2)
    assert sessions.trials.alone > 1.4


@pytest.mark.parametrize("drafts", [True, False])
def test_some_slow_rounds_say_nothing(drafts: bool) -> None:
    """In every other stretch that is no trial, one round in four waits for a piece of somebody's prompt."""
    sessions = Sessions(drafting=1.0, alone=1.0, usually_drafts=drafts)
    for i in range(300):
        sessions.stretch()
        for j in range(ROUNDS) if i % 2 and not sessions.trials.is_due else ():
            sessions.trials.observe(j % 4, 10.0)
    assert sessions.trials.alone == pytest.approx(1.0)


def test_who_falls_out_of_step_counts_as_much_as_who_runs_on() -> None:
    """Half of the sessions, without drafts, have two rounds while the others wait for theirs."""
    trials = LoadTrials(lambda: 0.0)
    trials.next_stretch(4)
    trials.expect(planned(True, {0: 1.0, 1: 1.0, 2: 3.0, 3: 3.0}, DRAFTING))
    for i in range(40):
        for session in (0, 1, 0, 1, 2, 3) if i > 4 else (0, 1, 2, 3):
            trials.observe(session, 0.025 if session < 2 else 0.050)
    # They have 2 / 0.025 + 6 / 0.050 = 200 tokens a second, and should have 8 / 0.030.
    assert trials._stretch.surprise == pytest.approx(8 / 0.030 / 200)


def test_sessions_that_come_in_the_middle_and_change_what_all_do_begin_it_anew() -> None:
    trials = LoadTrials(lambda: 0.0)
    trials.next_stretch(4)
    trials.expect(planned(False, dict.fromkeys(range(4), 1.0), ALONE))
    for _ in range(40):
        trials.observe(0, 100.0)
    trials.expect(planned(True, dict.fromkeys(range(5), 3.0), DRAFTING))
    for _ in range(40):
        trials.observe(0, DRAFTING)
    assert trials._stretch.surprise == pytest.approx(1.0)


def test_a_trial_that_is_cut_off_because_sessions_come_and_go_has_its_price_too() -> None:
    """Five sessions count as four, six as eight."""
    sessions = Sessions(drafting=1.0, alone=1.0)
    for num_sessions in (5, 6):
        sessions.stretches(50, num_sessions)
    begun_at, trials = sessions.now, 0.0
    for i in range(400):
        before = sessions.now
        sessions.stretch((5, 5, 6, 6)[i % 4])
        trials += (sessions.now - before) * sessions.was_trial
    assert trials < 0.1 * (sessions.now - begun_at)


def test_what_becomes_busy_between_two_sizes_is_not_held_against_a_trial() -> None:
    sessions = Sessions(drafting=1.0, alone=1.0)
    sessions.stretches(100, 4)
    sessions.stretches(100, 2)
    sessions.drafting = sessions.alone = 3.0
    sessions.stretches(100, 4)
    assert sessions.trials.alone == pytest.approx(1.0)


def test_the_first_rounds_of_a_stretch_say_nothing() -> None:
    trials = LoadTrials(lambda: 0.0)
    trials.next_stretch(2)
    trials.expect(planned(True, {0: 3.0, 1: 3.0}, DRAFTING))
    for took in (1.0, 1.0, 1.0, DRAFTING, DRAFTING):
        for session in (0, 1):
            trials.observe(session, took)
    assert trials._stretch.surprise == pytest.approx(1.0)


def test_sessions_that_have_ended_are_not_judged() -> None:
    """Those that are planned for then have not had a round."""
    trials = LoadTrials(lambda: 0.0)
    trials.next_stretch(3)
    trials.expect(planned(True, {"ended": 3.0}, DRAFTING))
    for _ in range(10):
        trials.observe("ended", 5 * DRAFTING)
    trials.expect(planned(True, {"new": 3.0}, DRAFTING))
    trials.next_stretch(3)
    assert not trials.is_due  # nothing is known of what is usual


def test_a_single_trial_does_not_say_much() -> None:
    sessions = Sessions(drafting=1.0, alone=1.0)
    sessions.stretches(20)
    sessions.alone = 100.0
    while not sessions.was_trial:
        sessions.stretch()
    sessions.trials.next_stretch(4)
    assert sessions.trials.alone < 1.5


def test_what_a_trial_costs_is_what_its_rounds_take() -> None:
    """Not an hour in which a client did not read, or the draft was away."""
    sessions = Sessions(drafting=1.0, alone=1.0)
    sessions.stretches(20)
    while not sessions.was_trial:
        sessions.stretch()
    sessions.now += 3600
    before = sessions.now
    sessions.stretch()
    while not sessions.was_trial:
        sessions.stretch()
    assert sessions.now - before < 100

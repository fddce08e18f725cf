"""Several sessions draft together where that is faster, and hardly otherwise."""

from __future__ import annotations

import pytest

from coordinator.plan import RoundCosts
from coordinator.shared_rounds import SharedRounds
from specd.settings import MAX_NUM_DRAFT_TOKENS

ROUNDS = 8  # of each session in a stretch
ALIKE = [0.8**i for i in range(1, MAX_NUM_DRAFT_TOKENS + 1)]
IN_VAIN = [0.1**i for i in range(1, MAX_NUM_DRAFT_TOKENS + 1)]
STEP, VERIFY, PER_TOKEN = 0.001, 0.010, 0.002


class Sessions:
    """Some that take stretch after stretch, whose rounds take so many times as long as their parts say."""

    def __init__(self, *, drafting: float, alone: float) -> None:
        self.now = 0.0
        self.rounds = SharedRounds(lambda: self.now)
        self.drafting, self.alone = drafting, alone

    def stretch(self, *accepted: list[float]) -> list[int]:
        """Let a stretch go by; returns each session's k."""
        self.rounds.next_stretch(len(accepted))
        costs = self.costs
        ks = [self.rounds.num_draft_tokens(i, lambda: dict(enumerate(accepted)), costs) for i in range(len(accepted))]
        width = sum(ks) / len(ks)
        seconds = VERIFY + PER_TOKEN * width + STEP * max(ks)
        for _ in range(ROUNDS):
            self.now += seconds * (self.drafting if any(ks) else self.alone)
            for i in range(len(ks)):
                self.rounds.observe(i, seconds * (self.drafting if any(ks) else self.alone))
        return ks

    @property
    def costs(self) -> RoundCosts:
        places = range(MAX_NUM_DRAFT_TOKENS + 1)
        verify = [VERIFY + PER_TOKEN * k for k in places]
        return RoundCosts([STEP * k for k in places], verify, asking=0.0, always=0.0, alone=self.rounds.alone)

    def part_that_drafts(self, num_stretches: int, num_sessions: int, accepted: list[float]) -> float:
        begun_at, part = self.now, 0.0
        for _ in range(num_stretches):
            before = self.now
            if any(self.stretch(*[accepted] * num_sessions)):
                part += self.now - before
        return part / (self.now - begun_at)


@pytest.mark.parametrize(
    ("drafting", "alone"), [(1.0, 1.0), (0.7, 1.0), (1.3, 1.0), (2.0, 1.0), (2.0, 2.0), (1.0, 0.4)]
)
@pytest.mark.parametrize("num_sessions", [2, 5, 16])
def test_the_faster_gets_nearly_all_the_time(num_sessions: int, drafting: float, alone: float) -> None:
    sessions = Sessions(drafting=drafting, alone=alone)
    best = max((1 + sum(ALIKE[:k])) / (VERIFY + (PER_TOKEN + STEP) * k) for k in range(1, 8))
    drafts = best / drafting > 1 / VERIFY / alone
    part = sessions.part_that_drafts(2000, num_sessions, ALIKE)
    assert (part if drafts else 1 - part) > 0.95


def test_a_hopeless_draft_is_hardly_tried_and_nothing_is_learnt_of_what_rounds_take() -> None:
    sessions = Sessions(drafting=1.0, alone=1.0)
    num_trials = 0
    for _ in range(500):
        is_drafted = any(sessions.stretch(*[IN_VAIN] * 4))
        assert sessions.rounds.is_trial is is_drafted  # else single rounds may be tried
        num_trials += is_drafted
    assert num_trials < 25
    assert sessions.rounds.alone == pytest.approx(1.0)
    usual = sessions.rounds._trials._known[2].usual
    assert usual is not None
    assert usual.value == pytest.approx(1.0)


def test_what_texts_give_says_nothing_of_what_rounds_take() -> None:
    """As soon as others come than those that it was in vain for, they have drafts."""
    sessions = Sessions(drafting=1.1, alone=1.0)
    for _ in range(10):
        assert any(any(sessions.stretch(*[ALIKE] * 4)) for _ in range(2))  # once it may be a trial
        assert sum(any(sessions.stretch(*[IN_VAIN] * 4)) for _ in range(100)) < 10


def test_each_goes_as_far_as_pays() -> None:
    sessions = Sessions(drafting=1.0, alone=1.0)
    ks = [sessions.stretch(ALIKE, IN_VAIN, ALIKE) for _ in range(20)]
    first, second, third = ks[-1]
    assert first == third > 1
    assert second == 0


def test_in_a_stretch_that_has_begun_new_sessions_are_planned_for_with_the_others() -> None:
    sessions = Sessions(drafting=1.0, alone=1.0)
    sessions.rounds.next_stretch(2)
    costs = sessions.costs
    assert sessions.rounds.num_draft_tokens("a", lambda: {"a": ALIKE}, costs) > 0
    assert sessions.rounds.num_draft_tokens("b", lambda: {"a": ALIKE, "b": IN_VAIN}, costs) == 0
    assert sessions.rounds.num_draft_tokens("a", dict, costs) > 0


def test_a_session_that_turns_out_to_gain_nothing_is_planned_for_anew() -> None:
    sessions = Sessions(drafting=1.0, alone=1.0)
    sessions.rounds.next_stretch(2)
    costs, accepted = sessions.costs, {"a": ALIKE, "b": ALIKE}
    assert sessions.rounds.num_draft_tokens("a", lambda: accepted, costs) > 0
    sessions.rounds.reconsider("b", [0.95 * own for own in ALIKE])
    accepted = {"a": ALIKE, "b": IN_VAIN}
    assert sessions.rounds.num_draft_tokens("b", lambda: accepted, costs) > 0
    sessions.rounds.reconsider("b", IN_VAIN)
    assert sessions.rounds.num_draft_tokens("b", lambda: accepted, costs) == 0
    assert sessions.rounds.num_draft_tokens("a", lambda: accepted, costs) > 0

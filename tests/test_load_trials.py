"""Several sessions draft where that has turned out to be faster, and hardly otherwise."""

from __future__ import annotations

import random

import pytest

from coordinator.load_trials import LoadTrials

ROUNDS = 8  # of each session in a stretch


class Sessions:
    """So many that take stretch after stretch; a round takes so many seconds, and has so many tokens if it drafts."""

    def __init__(self, *, drafting: float, alone: float, tokens: int = 3, noise: float = 0.0) -> None:
        self.now = 0.0
        self.trials = LoadTrials(lambda: self.now)
        self.drafting, self.alone, self.tokens, self.noise = drafting, alone, tokens, noise
        self._random = random.Random(0)

    def stretch(self, num_sessions: int = 4, *, forecast: bool = True) -> bool:
        """Let a stretch go by; returns whether they drafted."""
        self.trials.next_stretch(num_sessions)
        drafted = self.trials.drafts and forecast
        for _ in range(ROUNDS):
            seconds = (self.drafting if drafted else self.alone) * self._random.uniform(1, 1 + self.noise)
            self.now += seconds
            for _ in range(num_sessions):
                self.trials.observe(num_sessions, self.tokens if drafted else 1, seconds, drafted=drafted)
        return drafted

    def part_of(self, wanted: bool, num_stretches: int, num_sessions: int = 4) -> float:
        """Return the part of the time of so many stretches in which they drafted, or did not."""
        begun_at, part = self.now, 0.0
        for _ in range(num_stretches):
            before = self.now
            if self.stretch(num_sessions) is wanted:
                part += self.now - before
        return part / (self.now - begun_at)


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize(("drafting", "alone"), [(0.045, 0.020), (0.075, 0.020), (0.020, 0.020), (0.100, 0.020)])
@pytest.mark.parametrize("num_sessions", [2, 5, 16])
def test_the_faster_gets_nearly_all_the_time(num_sessions: int, drafting: float, alone: float, noise: float) -> None:
    sessions = Sessions(drafting=drafting, alone=alone, noise=noise)
    faster = 3 / drafting > 1 / alone
    assert sessions.part_of(faster, 2000, num_sessions) > 0.9


def test_it_notices_a_change() -> None:
    sessions = Sessions(drafting=0.08, alone=0.02)
    for _ in range(200):
        sessions.stretch()
    sessions.drafting = 0.03
    assert sum(sessions.stretch() for _ in range(400)) > 200


def test_where_the_forecast_is_against_it_nothing_is_lost() -> None:
    sessions = Sessions(drafting=1.0, alone=0.02)
    assert not any(sessions.stretch(forecast=False) for _ in range(100))
    assert sessions.trials.drafts  # as soon as the forecast is


def test_what_pays_for_few_is_not_taken_for_many() -> None:
    sessions = Sessions(drafting=0.08, alone=0.02)
    for _ in range(20):
        sessions.stretch(2)
    assert not sessions.trials.drafts
    sessions.drafting = 0.03
    assert sessions.stretch(8)


def test_some_slow_rounds_say_nothing() -> None:
    """In every other stretch with a draft, one round in four waits for a piece of somebody's prompt."""
    sessions = Sessions(drafting=0.05, alone=0.02)
    for i in range(200):
        drafted = sessions.trials.drafts
        for j in range(ROUNDS * 4):
            slow = 0.2 if drafted and i % 2 and j % 4 == 0 else 0.0
            sessions.trials.observe(4, 3 if drafted else 1, (0.05 if drafted else 0.02) + slow, drafted=drafted)
        sessions.now += ROUNDS * (0.05 if drafted else 0.02)
        sessions.trials.next_stretch(4)
    assert sessions.part_of(True, 200) > 0.9

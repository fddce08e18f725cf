"""Waiting for stragglers: what it learns, when it waits, and what that does to a simulated worker."""

from __future__ import annotations

import gc
import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specd.worker.engine.batch_window import BatchWindow

FIXED = 1.0
# Between a step's end and the next look at what there is, some time passes.
TURNAROUND = 1e-4


class Session:
    """Anything that can be hashed and weakly referred to."""


def taught(away_seconds: float, *, shares_cores: bool = False) -> BatchWindow:
    """Return a window that knows the fixed cost, and the time that sessions stay away."""
    window, session = BatchWindow(shares_cores=shares_cores), Session()
    for num_tokens in (1, 2, 3, 4):
        window.stepped(num_tokens, FIXED + 0.1 * num_tokens)
    assert window.fixed_seconds == pytest.approx(FIXED)
    for i in range(200):
        window.answered(session, 100.0 * i)
        window.arrived(session, 100.0 * i + away_seconds)
    return window


def num_expected(window: BatchWindow) -> int:
    return len(window._answered_at)


@dataclass(frozen=True)
class Ran:
    rounds_per_second: float
    sessions_per_step: float
    most_waited: float


def simulate(
    away_seconds: Sequence[float],
    *,
    per_token: float,
    jitter: float = 0.05,
    waits: bool = True,
    seconds: float = 300.0,
) -> Ran:
    """Serve sessions, each away for its time between two rounds, in steps that take FIXED + per_token * tokens.

    What it returns is about the second half.
    """
    rng = random.Random(0)
    window = BatchWindow()
    sessions = [Session() for _ in away_seconds]
    coming = [(rng.random(), i) for i in range(len(sessions))]
    heapq.heapify(coming)
    ready: list[int] = []
    now = idle_since = most_waited = 0.0
    num_steps = num_rounds = 0
    while now < seconds:
        while coming and coming[0][0] <= now:
            came_at, i = heapq.heappop(coming)
            window.arrived(sessions[i], came_at)
            if not ready:
                idle_since = now
            ready.append(i)
        wait_until = window.ends_at(idle_since, now) if ready and waits else now
        if not ready:
            now = coming[0][0]
        elif wait_until > now:
            now = min(wait_until, coming[0][0]) if coming else wait_until
        else:
            most_waited = max(most_waited, (now - idle_since) / window.fixed_seconds if window.fixed_seconds else 0.0)
            num_tokens = sum(rng.randint(1, 7) for _ in ready)
            took = (FIXED + per_token * num_tokens) * rng.uniform(1 - jitter, 1 + jitter)
            now += took
            for i in ready:
                window.answered(sessions[i], now)
                heapq.heappush(coming, (now + away_seconds[i] * rng.uniform(1 - jitter, 1 + jitter), i))
            window.stepped(num_tokens, took)
            if now > seconds / 2:
                num_steps += 1
                num_rounds += len(ready)
            ready = []
            now += TURNAROUND
    return Ran(num_rounds / (seconds / 2), num_rounds / num_steps, most_waited)


@given(fixed=st.floats(1e-4, 10.0), slope=st.floats(0.0, 0.1), noise=st.floats(0.0, 0.02), seed=st.integers(0, 2**32))
def test_the_fixed_cost_of_steps_is_learnt(fixed: float, slope: float, noise: float, seed: int) -> None:
    rng, window = random.Random(seed), BatchWindow()
    for _ in range(100):
        num_tokens = rng.randint(1, 32)
        window.stepped(num_tokens, fixed * (1 + slope * num_tokens) * rng.uniform(1 - noise, 1 + noise))
    assert window.fixed_seconds == pytest.approx(fixed, rel=1e-6 + 6 * noise)


def test_a_new_fixed_cost_replaces_the_old_one() -> None:
    window = BatchWindow()
    for fixed in (1.0, 3.0, 0.5):
        for i in range(100):
            window.stepped(1 + i % 5, fixed + 0.1 * (1 + i % 5))
        assert window.fixed_seconds == pytest.approx(fixed, rel=0.01)


@given(num_tokens=st.integers(1, 256), seconds=st.lists(st.floats(0.0, 10.0), max_size=50))
def test_steps_that_are_all_alike_say_nothing(num_tokens: int, seconds: list[float]) -> None:
    window = BatchWindow()
    for took in seconds:
        window.stepped(num_tokens, took)
    assert window.fixed_seconds == 0.0


def test_steps_of_the_warm_up_say_nothing_about_those_of_sessions() -> None:
    """The last one also has the seconds of the calibration. It made the fixed cost 0 for the first hundred steps."""
    window = BatchWindow()
    for seconds in (0.05, 5.0):
        window.stepped(39, seconds)
    window.expect(FIXED)
    for num_tokens in (24, 3, 3, 3):
        window.stepped(num_tokens, FIXED + 0.1 * num_tokens)
        assert window.fixed_seconds == pytest.approx(FIXED)


def test_steps_that_are_all_alike_leave_what_was_known() -> None:
    window = taught(0.3)
    for _ in range(100):
        window.stepped(100, FIXED + 0.1 * 100)
    assert window.fixed_seconds == pytest.approx(FIXED)
    for seconds in (5.0, 20.0) * 100:
        window.stepped(100, seconds)
    assert window.fixed_seconds == pytest.approx(FIXED)


@given(steps=st.lists(st.tuples(st.integers(1, 256), st.floats(0.0, 10.0)), max_size=50))
def test_the_fixed_cost_is_between_nothing_and_what_steps_take(steps: list[tuple[int, float]]) -> None:
    window = BatchWindow()
    for num_tokens, seconds in steps:
        window.stepped(num_tokens, seconds)
        assert 0.0 <= window.fixed_seconds <= max(took for _, took in steps) * (1 + 1e-9)


def test_nothing_waits_before_anything_is_known() -> None:
    window, session = BatchWindow(), Session()
    window.answered(session, 5.0)
    assert window.ends_at(5.0, 5.0) == 5.0
    for num_tokens in (1, 2, 3, 4):
        window.stepped(num_tokens, FIXED + 0.1 * num_tokens)
    window.answered(session, 5.0)
    assert window.ends_at(5.0, 5.0) == 5.0


def test_a_step_waits_for_a_session_that_will_soon_be_back_and_twice_as_long_at_most() -> None:
    window, session = taught(0.3), Session()
    assert window.ends_at(5.0, 5.0) == 5.0
    window.answered(session, 5.0)
    assert window.ends_at(5.1, 5.1) == pytest.approx(5.6)
    window.arrived(session, 5.2)
    assert window.ends_at(5.1, 5.2) <= 5.2


def test_a_step_waits_for_the_last_of_several() -> None:
    window, sessions = taught(0.3), [Session() for _ in range(3)]
    for session, answered_at in zip(sessions, (5.2, 5.3, 5.1), strict=True):
        window.answered(session, answered_at)
    assert window.ends_at(5.2, 5.2) == pytest.approx(5.9)


@pytest.mark.parametrize("away_seconds", [0.9 * FIXED, 1.5 * FIXED])
def test_a_step_does_not_wait_for_sessions_that_stay_away_for_as_long_as_it_takes(away_seconds: float) -> None:
    window, session = taught(away_seconds), Session()
    window.answered(session, 5.0)
    assert window.ends_at(5.0 + 0.9 * away_seconds, 5.0 + 0.9 * away_seconds) <= 5.0 + 0.9 * away_seconds


@given(
    away_seconds=st.floats(0.0, 2.0),
    answered_at=st.lists(st.floats(0.0, 10.0), max_size=8),
    idle_since=st.floats(0.0, 10.0),
    waited=st.floats(0.0, 2.0),
    shares_cores=st.booleans(),
)
def test_no_step_waits_for_longer_than_a_step_costs(
    away_seconds: float, answered_at: list[float], idle_since: float, waited: float, shares_cores: bool
) -> None:
    window, sessions = taught(away_seconds, shares_cores=shares_cores), [Session() for _ in answered_at]
    for session, at in zip(sessions, answered_at, strict=True):
        window.answered(session, at)
    longest = (1.5 if shares_cores else 1.0) * window.fixed_seconds
    assert idle_since <= window.ends_at(idle_since, idle_since + waited) <= idle_since + longest


@pytest.mark.parametrize(("away_seconds", "waits"), [(0.9 * FIXED, True), (1.4 * FIXED, True), (1.6 * FIXED, False)])
def test_where_two_groups_would_take_cores_from_each_other_a_step_waits_for_longer(
    away_seconds: float, waits: bool
) -> None:
    window, session = taught(away_seconds, shares_cores=True), Session()
    window.answered(session, 5.0)
    now = 5.0 + 0.9 * away_seconds
    assert (window.ends_at(now, now) > now) == waits


def test_who_does_not_come_back_is_forgotten() -> None:
    window, sessions = taught(0.3), [Session() for _ in range(100)]
    for session in sessions:
        window.answered(session, 5.0)
    assert num_expected(window) == 100
    window.ends_at(7.1, 7.1)
    assert num_expected(window) == 0
    window.answered(sessions[0], 8.0)
    window.arrived(sessions[0], 1000.0)  # a pause is not what to expect
    window.answered(sessions[0], 1001.0)
    assert window.ends_at(1001.0, 1001.0) == pytest.approx(1001.6)


def test_sessions_that_are_gone_are_not_held() -> None:
    window, sessions = taught(0.3), [Session() for _ in range(100)]
    for session in sessions:
        window.answered(session, 5.0)
    del sessions, session
    gc.collect()
    assert num_expected(window) == 0
    assert window.ends_at(5.0, 5.0) == 5.0


@pytest.mark.parametrize("per_token", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("away_seconds", [0.02, 0.2, 0.4, 0.6])
@pytest.mark.parametrize("num_sessions", [2, 3, 6])
def test_sessions_that_are_soon_back_come_to_be_served_in_lockstep(
    num_sessions: int, away_seconds: float, per_token: float
) -> None:
    away = [away_seconds] * num_sessions
    together = simulate(away, per_token=per_token)
    apart = simulate(away, per_token=per_token, waits=False)
    assert apart.sessions_per_step < 0.7 * num_sessions
    assert together.sessions_per_step > 0.95 * num_sessions
    assert together.rounds_per_second > 1.05 * apart.rounds_per_second


def test_sessions_that_change_their_pace_are_followed() -> None:
    """Also when no step waits for the slower sessions: the window still learns how slow they are."""
    window, sessions = taught(0.05), [Session(), Session()]
    for i in range(100):
        at = 10.0 * i
        window.answered(sessions[0], at)
        window.ends_at(at, at + TURNAROUND)
        window.ends_at(at, at + 0.5)
        window.arrived(sessions[0], at + 0.6)
    window.answered(sessions[0], 2000.0)
    assert window.ends_at(2000.5, 2000.5) == pytest.approx(2001.2, abs=0.01)


@pytest.mark.parametrize("jitter", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("num_sessions", [1, 2, 3, 8])
def test_waiting_never_costs_noticeable_throughput(num_sessions: int, jitter: float) -> None:
    for per_token in (0.01, 0.2):
        for away_seconds in (0.01, 0.3, 0.7, 0.95, 1.05, 1.5, 3.0, 10.0):
            away = [away_seconds] * num_sessions
            waiting = simulate(away, per_token=per_token, jitter=jitter, seconds=200.0 * num_sessions)
            at_once = simulate(away, per_token=per_token, jitter=jitter, seconds=200.0 * num_sessions, waits=False)
            assert waiting.rounds_per_second > 0.95 * at_once.rounds_per_second, (per_token, away_seconds)


@given(away_seconds=st.lists(st.floats(0.0, 5.0), min_size=1, max_size=6), per_token=st.floats(0.0, 0.2))
@settings(max_examples=25)
def test_sessions_of_different_pace_wait_for_each_other_within_the_limit(
    away_seconds: list[float], per_token: float
) -> None:
    assume(sum(away_seconds) > 0)
    ran = simulate(away_seconds, per_token=per_token, seconds=60.0)
    assert ran.most_waited <= 1 + 1e-6

"""The time of a token in several sessions: measured, or derived from measurements."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coordinator.planner.speed import Speed
from coordinator.sessions.fairness import affordable_sessions
from coordinator.sources import Sources
from specd.vocabulary import TokenSource
from tests.unit.simulation import Simulation, World

GPU: Callable[[int], float] = lambda number: 10.0 + 0.1 * number  # noqa: E731
CPU: Callable[[int], float] = lambda number: 2.0 + 5.0 * number  # noqa: E731


def speed_of(**seen: float) -> Speed:
    speed = Speed()
    for number, seconds in seen.items():
        speed.add(int(number.removeprefix("of_")), 3 * seconds, 3)
    return speed


@pytest.mark.parametrize("k", [None, 0, 3])
@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_it_is_what_sessions_have_shown(at_once: int, k: int | None) -> None:
    simulation = Simulation(World())
    sources = Sources((TokenSource.DRAFT,), k)
    actual = at_once / simulation.run(num_sessions=32, at_once=at_once, tokens=128, sources=sources)
    seen = simulation.planner.speed.seconds_per_token(at_once)
    print(f"seen {seen * 1e3:.1f} ms, actual {actual * 1e3:.1f} ms")
    assert seen == pytest.approx(actual, rel=0.15)


def test_what_was_not_seen_follows_from_what_was() -> None:
    assert Speed().seconds_per_token(3) == 0.0
    one = speed_of(of_2=10.0)
    assert [one.seconds_per_token(number) for number in (1, 2, 3, 8)] == [5.0, 10.0, 15.0, 40.0]
    flat = speed_of(of_2=10.0, of_8=11.2)
    assert [flat.seconds_per_token(number) for number in (1, 5, 8, 16)] == pytest.approx([9.8, 10.6, 11.2, 22.4])
    noisy = speed_of(of_2=10.0, of_8=9.0)
    assert noisy.seconds_per_token(1) == 10.0, "fewer are not slower"
    steep = speed_of(of_2=10.0, of_3=30.0)
    assert steep.seconds_per_token(1) == 5.0, "nor faster than in proportion"


@pytest.mark.parametrize(("true", "expected"), [(GPU, 8), (CPU, 2)])
@pytest.mark.parametrize("was_alone", [True, False])
def test_as_many_come_to_run_as_are_fast_enough(
    true: Callable[[int], float], expected: int, *, was_alone: bool
) -> None:
    """One client has eight sessions; another comes with one, which ran alone before or never did."""
    speed = Speed()
    if was_alone:
        speed.add(1, true(1), 1)
    speed.add(8, true(8), 1)
    running = 8
    for _ in range(20):
        running = affordable_sessions([8, 1], 8, speed.seconds_per_token)
        speed.add(running, true(running), 1)
    assert running == expected

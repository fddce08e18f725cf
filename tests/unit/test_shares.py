"""The number of sessions of several clients that can run together, by the cost of a batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.sessions.fairness import affordable_sessions


@pytest.mark.parametrize(
    ("seconds_per_token", "expected"),
    [
        pytest.param(lambda _: 1.0, 8, id="a batch costs what a session does"),
        pytest.param(lambda number: number, 2, id="a batch costs as much as its sessions one after the other"),
        pytest.param(lambda number: 2.0 + number, 4, id="in between"),
        pytest.param(lambda _: 0.0, 8, id="nothing is known yet"),
    ],
)
def test_of_two_clients_the_one_with_one_session_has_half_of_the_machine(
    seconds_per_token: Callable[[int], float], expected: int
) -> None:
    assert affordable_sessions([1, 8], 8, seconds_per_token) == expected


@pytest.mark.parametrize(("wanted", "expected"), [([], 8), ([0], 8), ([0, 0], 8), ([0, 3], 8), ([0, 1, 8], 2)])
def test_a_client_that_wants_none_takes_no_part(wanted: list[int], expected: int) -> None:
    assert affordable_sessions(wanted, 8, lambda number: number if wanted[-1] == 8 else 1.0) == expected


costs = st.lists(st.floats(0.0, 10.0), min_size=64, max_size=64).map(lambda steps: [1.0, *steps])


@given(wanted=st.lists(st.integers(0, 20), max_size=10), places=st.integers(1, 64), steps=costs)
def test_nobody_is_slower_than_with_its_part_of_the_machine(wanted: list[int], places: int, steps: list[float]) -> None:
    def seconds_per_token(number: int) -> float:
        return sum(steps[:number])

    affordable = affordable_sessions(wanted, places, seconds_per_token)
    wanted = [number for number in wanted if number]
    if not wanted:
        assert affordable == places
        return
    n, fewest = len(wanted), min(*wanted, max(places // len(wanted), 1))
    equal = min(n * fewest, places)
    assert equal <= affordable <= places
    if affordable > equal:
        assert seconds_per_token(affordable) <= n * seconds_per_token(fewest)
    if affordable < places:
        assert seconds_per_token(affordable + 1) > n * seconds_per_token(fewest)

"""How far several sessions speculate that share the workers' steps, against every fixed k in hindsight."""

from __future__ import annotations

import random
from functools import cache

import pytest

from tests.simulated_load import SimulatedLoad
from tests.test_speculation import good, hopeless, middling

SECONDS = 20.0
FIXED_KS = (0, 1, 2, 3, 4, 5, 7)


def hopeless_for_some(rng: random.Random, place: int) -> tuple[float, float]:
    """A third of the sessions get nothing from the draft."""
    if place == 0:
        rng.hopeless = rng.random() < 1 / 3  # type: ignore[attr-defined]
    return hopeless(rng, place) if rng.hopeless else good(rng, place)  # type: ignore[attr-defined]


GUESSES = {"good": good, "middling": middling, "hopeless": hopeless, "hopeless for some": hopeless_for_some}


@cache
def run(num_sessions: int, k: int | None, name: str) -> tuple[float, SimulatedLoad]:
    load = SimulatedLoad(num_sessions, k, GUESSES[name])
    load.tokens_per_second(2.0)  # they begin one after another
    return load.tokens_per_second(SECONDS), load


@pytest.mark.parametrize("num_sessions", [2, 4, 8, 16])
@pytest.mark.parametrize("name", GUESSES)
def test_it_is_hardly_slower_than_the_best_fixed_k(name: str, num_sessions: int) -> None:
    rate, _ = run(num_sessions, None, name)
    assert rate > 0.95 * max(run(num_sessions, k, name)[0] for k in FIXED_KS)


@pytest.mark.parametrize(("num_sessions", "k"), [*((n, k) for n in (2, 4, 8, 16) for k in (0, None)), (2, 3), (4, 3)])
def test_sessions_share_steps(num_sessions: int, k: int | None) -> None:
    """Also those that always take equally long: as two groups that take turns, they would go on so for ever.

    Three draft tokens for eight take longer than what a step costs besides its tokens: they had better take turns.
    """
    _, load = run(num_sessions, k, "good")
    steps = load.target.rows
    assert sum(sessions * count for sessions, count in steps.items()) / steps.total() > 0.8 * num_sessions


@pytest.mark.parametrize("num_sessions", [4, 16])
def test_they_go_equally_far(num_sessions: int) -> None:
    _, load = run(num_sessions, None, "good")
    counts = sorted(load.chosen.values())
    assert sum(counts[-2:]) > 0.6 * sum(counts)


@pytest.mark.parametrize("name", ["good", "middling"])
def test_what_one_session_has_learnt_of_proposals_that_end_early_is_not_taken_for_all(name: str) -> None:
    """Alone, it goes far where it is easy; four that go equally far must not go that far everywhere."""
    load = SimulatedLoad(1, None, GUESSES[name])
    load.tokens_per_second(SECONDS)
    load.chosen.clear()
    load.add_clients(3)
    at_first, later = load.tokens_per_second(3.0), load.tokens_per_second(SECONDS)
    assert at_first > 0.85 * later
    assert max(load.chosen) <= 11

"""How far several sessions speculate that share the workers' steps, against every fixed k in hindsight."""

from __future__ import annotations

import itertools
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


def each_its_own(rng: random.Random, place: int) -> tuple[float, float]:
    """Each session gets another part of its tokens from the draft."""
    if place == 0:
        rng.level = rng.choice((0.3, 0.5, 0.7, 0.8, 0.9, 0.95))  # type: ignore[attr-defined]
    level: float = rng.level  # type: ignore[attr-defined]
    return min(max(rng.gauss(level, 0.2), 0.05), 0.99), min(max(rng.gauss(level, 0.15), 0.0), 1.0)


GUESSES = {
    "good": good,
    "middling": middling,
    "hopeless": hopeless,
    "hopeless for some": hopeless_for_some,
    "each its own": each_its_own,
}


def settled_rate(load: SimulatedLoad) -> float:
    """Return the tokens per second once all have begun, which they do one after another."""
    load.tokens_per_second(2.0)
    return load.tokens_per_second(SECONDS)


@cache
def run(num_sessions: int, k: int | None, name: str) -> tuple[float, SimulatedLoad]:
    load = SimulatedLoad(num_sessions, k, GUESSES[name])
    return settled_rate(load), load


@pytest.mark.parametrize("num_sessions", [2, 4, 8, 16])
@pytest.mark.parametrize("name", GUESSES)
def test_it_is_hardly_slower_than_the_best_fixed_k(name: str, num_sessions: int) -> None:
    rate, _ = run(num_sessions, None, name)
    assert rate > 0.95 * max(run(num_sessions, k, name)[0] for k in FIXED_KS)


@pytest.mark.parametrize("num_sessions", [2, 4])
def test_drafting_for_those_that_gain_by_it_is_faster_than_the_best_k_for_all(num_sessions: int) -> None:
    name = "hopeless for some"
    rate, _ = run(num_sessions, None, name)
    assert rate > 1.04 * max(run(num_sessions, k, name)[0] for k in FIXED_KS)


def test_sessions_in_vain_at_the_same_time_do_not_keep_drafts_from_those_that_follow() -> None:
    """The last four of 24 get nothing from the draft."""
    numbers = itertools.count()

    def in_vain_for_four(rng: random.Random, place: int) -> tuple[float, float]:
        if place == 0:
            rng.hopeless = next(numbers) % 24 >= 20  # type: ignore[attr-defined]
        return hopeless(rng, place) if rng.hopeless else good(rng, place)  # type: ignore[attr-defined]

    def rate(k: int | None) -> float:
        nonlocal numbers
        numbers = itertools.count()
        return settled_rate(SimulatedLoad(4, k, in_vain_for_four))

    assert rate(None) > 1.05 * max(map(rate, FIXED_KS))


@pytest.mark.parametrize("num_sessions", [2, 4, 8])
def test_texts_that_the_draft_comes_to_know_have_drafts_again(num_sessions: int) -> None:
    load = SimulatedLoad(num_sessions, None, hopeless)
    load.tokens_per_second(40.0)
    load.guess = good
    load.tokens_per_second(30.0)
    assert load.tokens_per_second(SECONDS) > 0.95 * max(run(num_sessions, k, "good")[0] for k in FIXED_KS)


@pytest.mark.parametrize("given", [0, 3])
@pytest.mark.parametrize("name", ["good", "hopeless for some"])
@pytest.mark.parametrize(("num_given", "num_others"), [(1, 1), (3, 1), (2, 4)])
def test_sessions_whose_k_is_given_do_not_disturb_the_others(
    num_given: int, num_others: int, name: str, given: int
) -> None:
    def rate(k: int | None) -> float:
        load = SimulatedLoad(num_given, given, GUESSES[name])
        load.add_clients(num_others, k)
        return settled_rate(load)

    # They are planned for as if they were alone with each other, which they are not.
    assert rate(None) > 0.88 * max(map(rate, (0, 1, 3)))


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

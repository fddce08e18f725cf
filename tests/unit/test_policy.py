"""The policy: k against the closed formula, stop thresholds against every fixed k."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.planner.policy import RoundCosts, choose_k, stop_thresholds

K_MAX = 12

probabilities = st.floats(0.0, 1.0)
# In seconds; a verify that takes no time cannot be.
verify_curves = st.lists(st.floats(1e-3, 0.1), min_size=K_MAX + 1, max_size=K_MAX + 1)
draft_curves = st.lists(st.floats(0.0, 0.02), min_size=K_MAX, max_size=K_MAX).map(
    lambda steps: [*accumulate(steps, initial=0.0)]
)
overheads = st.floats(0.0, 0.005)


def costs_of(
    *, step: float = 1.6, verify: Callable[[int], float] = lambda k: 18.0, asking: float = 0.0, always: float = 0.0
) -> RoundCosts:
    """Return the costs of a draft with equal steps, and of a verify by k."""
    return RoundCosts([step * k for k in range(K_MAX + 1)], [verify(k) for k in range(K_MAX + 1)], asking, always)


def independent(p: float) -> list[float]:
    """Return the probability that the first i + 1 tokens are all accepted, each with probability p."""
    return [p**i for i in range(1, K_MAX + 1)]


ALL = [1.0] * K_MAX  # no proposal ends early


def closed_formula(p: float, costs: RoundCosts, k: int) -> float:
    """Leviathan et al., equation 1, over the time of a round."""
    tokens = k + 1 if p == 1 else (1 - p ** (k + 1)) / (1 - p)
    asking = costs.draft_overhead if k else 0.0
    return tokens / (costs.round_overhead + asking + costs.draft[k] + costs.verify[k])


@given(p=probabilities, draft=draft_curves, verify=verify_curves, asking=overheads, always=overheads)
def test_k_maximises_the_closed_formula(
    p: float, draft: list[float], verify: list[float], asking: float, always: float
) -> None:
    costs = RoundCosts(draft, verify, asking, always)
    k, rate = choose_k(independent(p), ALL, costs)
    rates = [closed_formula(p, costs, k) for k in range(K_MAX + 1)]
    assert rate == pytest.approx(max(rates))
    assert rates[k] == pytest.approx(max(rates))


@given(
    hazards=st.lists(st.tuples(probabilities, probabilities), min_size=K_MAX, max_size=K_MAX),
    draft=draft_curves,
    verify=verify_curves,
    asking=overheads,
    always=overheads,
)
def test_k_maximises_tokens_per_second_when_proposals_end_early(
    hazards: list[tuple[float, float]], draft: list[float], verify: list[float], asking: float, always: float
) -> None:
    """Against the sum over all lengths that a proposal can have."""
    costs = RoundCosts(draft, verify, asking, always)
    reached = [*accumulate((going_on for going_on, _ in hazards), lambda a, b: a * b)]
    accepted = [*accumulate((going_on * right for going_on, right in hazards), lambda a, b: a * b)]

    def rate_of(most: int) -> float:
        if most == 0:
            return 1 / (always + verify[0])
        at_least = [1.0, *reached[:most], 0.0]
        parts = [at_least[length] - at_least[length + 1] for length in range(most + 1)]
        seconds = sum(part * (draft[length] + verify[length]) for length, part in enumerate(parts))
        return (1 + sum(accepted[:most])) / (always + asking + seconds)

    k, rate = choose_k(accepted, reached, costs)
    num_reached = next((i for i, part in enumerate(reached) if part < 0.03), K_MAX)
    assert rate == pytest.approx(max(map(rate_of, range(num_reached + 1))))
    assert rate_of(k) == pytest.approx(rate)


@given(p=probabilities, verify=verify_curves, asking=overheads, always=overheads)
def test_k_is_0_where_drafting_cannot_pay(p: float, verify: list[float], asking: float, always: float) -> None:
    rising = sorted(verify)
    as_slow_as_the_target = [i * 1.001 * (rising[0] + always) for i in range(K_MAX + 1)]
    assert choose_k(independent(p), ALL, RoundCosts(as_slow_as_the_target, rising, asking, always))[0] == 0
    free = [0.0] * (K_MAX + 1)
    assert choose_k(independent(0.0), ALL, RoundCosts(free, rising, asking, always))[0] == 0


def test_a_free_and_perfect_draft_gets_the_largest_k() -> None:
    k, rate = choose_k(independent(1.0), ALL, costs_of(step=0.0))
    assert k == K_MAX
    assert rate == pytest.approx((K_MAX + 1) / 18.0)


@given(
    p=probabilities,
    flat=st.floats(1.0, 100.0),
    steps=st.lists(st.floats(0.0, 50.0), min_size=2, max_size=2),
    asking=overheads,
)
def test_a_dearer_draft_never_gets_a_larger_k_if_the_verify_is_flat(
    p: float, flat: float, steps: list[float], asking: float
) -> None:
    cheap, dear = sorted(steps)
    fewer, more = (
        choose_k(independent(p), ALL, costs_of(step=step, verify=lambda k: flat, asking=asking))[0]
        for step in (dear, cheap)
    )
    assert fewer <= more


@given(p=probabilities, costs=st.builds(RoundCosts, draft_curves, verify_curves, overheads, overheads))
def test_the_rate_is_never_below_the_target_alone(p: float, costs: RoundCosts) -> None:
    k, rate = choose_k(independent(p), ALL, costs)
    assert rate >= 1 / costs.target_only
    assert (rate > 1 / costs.target_only) == (k > 0)


# Where a proposal ends.


@given(
    draft=draft_curves,
    verify=verify_curves,
    rate=st.floats(0.0, 1e4),
    next_acceptance=st.floats(1e-3, 1.0),
    k=st.integers(0, K_MAX),
)
def test_thresholds_are_k_minus_1_probabilities(
    draft: list[float], verify: list[float], rate: float, next_acceptance: float, k: int
) -> None:
    thresholds = stop_thresholds(RoundCosts(draft, verify, 0.0, 0.0), rate, next_acceptance, k)
    assert len(thresholds) == max(k - 1, 0)
    assert all(0 <= threshold <= 1 for threshold in thresholds)


@given(rate=st.floats(0.0, 1e3), next_acceptance=st.floats(0.01, 1.0), k=st.integers(1, K_MAX))
def test_thresholds_are_0_where_more_tokens_cost_nothing(rate: float, next_acceptance: float, k: int) -> None:
    thresholds = stop_thresholds(costs_of(step=0.0), rate, next_acceptance, k)
    assert thresholds == [0.0] * (k - 1)


def test_a_threshold_is_the_added_cost_over_the_expected_tokens() -> None:
    costs = costs_of(step=2.0, verify=lambda k: 18.0 + k)
    # The best is one token more than there is: each further one costs as much, and is less likely. At the end, there
    # is none.
    assert stop_thresholds(costs, 0.05, 0.5, 4) == pytest.approx([3 * 0.05 / 0.5**2] * 2 + [0.0])
    # Over a step that is dear alone, three tokens on are better.
    jump = costs_of(step=0.1, verify=lambda k: 18.0 if k < 3 else 24.0)
    assert stop_thresholds(jump, 0.1, 0.8, 5)[0] == pytest.approx(6.3 * 0.1 / (0.8**2 + 0.8**3 + 0.8**4))


def test_thresholds_are_higher_before_a_jump_of_the_verify_than_after() -> None:
    costs = costs_of(verify=lambda k: 18.0 if k < 4 else 30.0)
    _, rate = choose_k(independent(0.9), ALL, costs)
    first, before, after, *_ = stop_thresholds(costs, rate, 0.9, K_MAX)
    assert before > 1.5 * after
    assert before > 1.5 * first


@given(verify=verify_curves, draft=draft_curves, next_acceptance=st.floats(0.01, 1.0), k=st.integers(2, K_MAX))
def test_thresholds_rise_with_the_rate(verify: list[float], draft: list[float], next_acceptance: float, k: int) -> None:
    costs = RoundCosts(draft, verify, 0.0, 0.0)
    low, high = (stop_thresholds(costs, rate, next_acceptance, k) for rate in (20.0, 40.0))
    assert all(a <= b for a, b in zip(low, high, strict=True))


# Verify steps of a real target, by k, in milliseconds.
REAL_VERIFY = [18.0, 20.0, 21.0, 21.0, 23.0, 23.0, 23.0, 23.0, 30.0, 30.7, 31.3, 32.0, 33.0]


def simulate(
    costs: RoundCosts,
    confidences_of: Callable[[random.Random], Sequence[float]],
    most: int,
    thresholds: Sequence[float] = (),
    num_rounds: int = 4000,
) -> float:
    """Return tokens per second where each token is accepted with the probability that its confidence says.

    A proposal ends with a token more than the first i if the product of their confidences is less than the i-th
    threshold: the draft worker looks at it a token late.
    """
    rng = random.Random(0)
    tokens, seconds = 0, 0.0
    for _ in range(num_rounds):
        confidences = confidences_of(rng)
        draws = [rng.random() for _ in range(K_MAX)]
        length, product = 0, 1.0
        while length < most:
            length += 1
            product *= confidences[length - 1]
            if length <= len(thresholds) and product < thresholds[length - 1]:
                length = min(length + 1, most)
                break
        accepted = 0
        while accepted < length and draws[accepted] < confidences[accepted]:
            accepted += 1
        tokens += accepted + 1
        seconds += (
            costs.round_overhead
            + (costs.draft_overhead if length else 0.0)
            + costs.draft[length]
            + costs.verify[length]
        )
    return tokens / seconds


def alike(rng: random.Random) -> list[float]:
    return [0.8] * K_MAX


def slightly_different(rng: random.Random) -> list[float]:
    return [rng.uniform(0.6, 1.0) for _ in range(K_MAX)]


def very_different(rng: random.Random) -> list[float]:
    return [0.99 if rng.random() < 0.8 else 0.15 for _ in range(K_MAX)]


def different_by_round(rng: random.Random) -> list[float]:
    return [0.98 if rng.random() < 0.5 else 0.3] * K_MAX


def next_acceptance_of(confidences_of: Callable[[random.Random], Sequence[float]]) -> float:
    """Return how likely a token is accepted if the one before it is."""
    rng = random.Random(1)
    firsts = [confidences_of(rng)[:2] for _ in range(10_000)]
    return sum(first * second for first, second in firsts) / sum(first for first, _ in firsts)


def stopping_gain(costs: RoundCosts, confidences_of: Callable[[random.Random], Sequence[float]]) -> float:
    """Return by how much stopping by thresholds beats the best fixed k, with the rate that it leads to itself."""
    rate = fixed = max(simulate(costs, confidences_of, k) for k in range(K_MAX + 1))
    next_acceptance = next_acceptance_of(confidences_of)
    for _ in range(4):
        rate = simulate(costs, confidences_of, K_MAX, stop_thresholds(costs, rate, next_acceptance, K_MAX))
    return rate / fixed


COSTS = {
    "real": costs_of(step=1.6, verify=lambda k: REAL_VERIFY[k], asking=0.5, always=1.0),
    "flat verify": costs_of(step=1.6, asking=0.5, always=1.0),
    "dear draft": costs_of(step=5.0, verify=lambda k: REAL_VERIFY[k], asking=0.5, always=1.0),
    "dear tokens": costs_of(step=1.0, verify=lambda k: 18.0 + 4.0 * k, asking=0.5, always=1.0),
}


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("confidences_of", [alike, slightly_different, very_different, different_by_round])
def test_stopping_by_confidence_is_no_worse_than_the_best_fixed_k(
    costs: RoundCosts, confidences_of: Callable[[random.Random], Sequence[float]]
) -> None:
    assert stopping_gain(costs, confidences_of) >= 0.99


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("confidences_of", [very_different, different_by_round])
def test_stopping_by_confidence_gains_where_confidences_differ(
    costs: RoundCosts, confidences_of: Callable[[random.Random], Sequence[float]]
) -> None:
    assert stopping_gain(costs, confidences_of) > 1.02

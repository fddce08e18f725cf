"""The policy for several sessions: shares against all ways, and against one token after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, product
from types import FrameType
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from coordinator.planner.policy import RoundCosts, choose_k, share_out
from specd.step_costs import interpolate
from tests.unit.test_policy import (
    ALL,
    K_MAX,
    costs_of,
    draft_curves,
    independent,
    overheads,
    probabilities,
    verify_curves,
)

FEW = 4  # draft tokens at most, so that all ways can be tried

together = st.lists(
    st.lists(probabilities, min_size=FEW, max_size=FEW).map(lambda hazards: [*accumulate(hazards, lambda a, b: a * b)]),
    min_size=1,
    max_size=3,
)


@given(accepted=together, draft=draft_curves, verify=verify_curves.map(sorted), asking=overheads, always=overheads)
def test_shares_are_near_the_best_of_all_combinations(
    accepted: list[list[float]], draft: list[float], verify: list[float], asking: float, always: float
) -> None:
    costs = RoundCosts(draft[: FEW + 1], verify[: FEW + 1], asking, always)

    def rate_of(ks: Sequence[int]) -> float:
        tokens = len(ks) + sum(sum(own[:k]) for own, k in zip(accepted, ks, strict=True))
        asked = costs.draft_overhead + costs.draft[max(ks)] if any(ks) else 0.0
        width = sum(ks) / len(ks)
        below = min(int(width), FEW - 1)
        verify_seconds = costs.verify[below] + (width - below) * (costs.verify[below + 1] - costs.verify[below])
        return tokens / (costs.round_overhead + asked + verify_seconds)

    best = max(map(rate_of, product(range(FEW + 1), repeat=len(accepted))))
    # Tokens that are hardly ever accepted are left out.
    assert rate_of([*share_out(dict(enumerate(accepted)), costs).values()]) >= best * (1 - 0.03 * FEW)


def one_token_after_the_other(
    accepted: Mapping[Hashable, Sequence[float]], costs: RoundCosts, least_gain: float = 1.0
) -> dict[Hashable, int]:
    """Return what `share_out` returns, by trying each number of tokens for each longest proposal, in plain steps."""
    n = len(accepted)
    tokens = sorted(
        ((p, session, i) for session, own in accepted.items() for i, p in enumerate(own) if p >= 0.03),
        key=lambda token: (-token[0], token[2]),
    )
    verify = dict(enumerate(costs.verify))
    best: list[Hashable] = []
    best_rate = best_tokens = 0.0
    for longest in range(1, 1 + max((i + 1 for _, _, i in tokens), default=0)):
        fixed = costs.round_overhead + costs.draft_overhead + costs.draft[longest]
        expected, chosen = float(n), list[Hashable]()
        for p, session, i in tokens:
            if i >= longest:
                continue
            expected += p
            chosen.append(session)
            rate = expected / (fixed + interpolate(verify, len(chosen) / n))
            if rate > best_rate:
                best_rate, best_tokens, best = rate, expected, chosen.copy()
    if best and best_tokens / (best_tokens / best_rate + costs.draft_wait) <= least_gain * n / costs.target_only:
        best = []
    return {session: best.count(session) for session in accepted}


@given(
    # Few different probabilities, so that many tokens are as likely as others; sessions of different lengths.
    accepted=st.lists(
        st.lists(st.sampled_from([1.0, 0.9, 0.5, 0.1, 0.0]) | probabilities, max_size=K_MAX).map(
            lambda hazards: [*accumulate(hazards, lambda a, b: a * b)]
        ),
        max_size=8,
    ),
    costs=st.builds(RoundCosts, draft_curves, verify_curves, overheads, overheads, st.floats(0.0, 0.05)),
    gain=st.floats(1.0, 1.2),
)
def test_shares_are_those_of_trying_one_token_after_the_other(
    accepted: list[list[float]], costs: RoundCosts, gain: float
) -> None:
    sessions: dict[Hashable, list[float]] = {f"session {i}": own for i, own in enumerate(accepted)}
    assert share_out(sessions, costs, gain) == one_token_after_the_other(sessions, costs, gain)


def num_instructions(work: Callable[[], object]) -> int:
    """Return how many instructions of Python some work takes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_shares_take_few_steps_for_each_token_however_many_sessions_and_positions_there_are() -> None:
    """They are made on the event loop whenever a session comes or goes."""
    most = 32
    costs = RoundCosts([0.1 * k for k in range(most + 1)], [10.0 + 0.1 * k for k in range(most + 1)], 1.0, 1.0)
    counts = {}
    for n in (4, 16):
        sessions: dict[Hashable, list[float]] = {i: [0.9**k for k in range(1, most + 1)] for i in range(n)}
        counts[n] = num_instructions(partial(share_out, sessions, costs))
        assert sum(share_out(sessions, costs).values()) > n
    assert counts[16] < 4 * counts[4]
    assert counts[16] < 100 * 16 * most


def test_a_session_that_accepts_nothing_gets_nothing_while_others_draft() -> None:
    good, hopeless = [0.8**i for i in range(1, K_MAX + 1)], [0.02] * K_MAX
    costs = costs_of(step=1.0, verify=lambda k: 10.0 + 2.0 * k, asking=1.0, always=1.0)
    first, second, third = share_out(dict(enumerate([good, hopeless, good])), costs).values()
    assert first == third > 1
    assert second == 0


@given(acceptance=st.floats(0.1, 0.95), wait=st.floats(0.0, 50.0))
def test_waits_decide_whether_sessions_draft_and_not_how_far(acceptance: float, wait: float) -> None:
    costs = costs_of(step=1.0, verify=lambda k: 10.0 + 2.0 * k, asking=1.0, always=1.0)
    sessions: dict[Hashable, list[float]] = dict.fromkeys(range(3), independent(acceptance))
    without, with_wait = (share_out(sessions, replace(costs, draft_wait=seconds)) for seconds in (0.0, wait))
    k = without[0]
    tokens = 1 + sum(independent(acceptance)[:k])
    seconds = 1.0 + 1.0 + costs.draft[k] + costs.verify[k] + wait
    pays = k > 0 and tokens / seconds > 1 / costs.target_only
    assert with_wait == (without if pays else dict.fromkeys(range(3), 0))


def test_equal_sessions_get_the_k_of_one() -> None:
    costs = costs_of(step=1.0, verify=lambda k: 10.0 + 2.0 * k, asking=1.0, always=1.0)
    k, _ = choose_k(independent(0.8), ALL, costs)
    alike: dict[Hashable, list[float]] = dict.fromkeys(range(5), independent(0.8))
    assert share_out(alike, costs) == dict.fromkeys(range(5), k)

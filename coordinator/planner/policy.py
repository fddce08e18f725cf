"""The policy: draft lengths that maximise expected tokens per second. Pure functions."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specd.step_costs import interpolate

# Positions that a smaller part of the proposals reaches, or is accepted up to, are not considered.
_NEGLIGIBLE = 0.03


@dataclass(frozen=True)
class RoundCosts:
    """Costs of a round by number k of draft tokens, in seconds.

    `draft[k]` is a proposal of k tokens, `verify[k]` its verification; both have the same length, but `draft` is empty
    without a draft model. `draft_overhead` is the rest of asking the draft, `round_overhead` the rest of any round.
    Sessions that share rounds besides wait `draft_wait` for each other when they draft.
    """

    draft: Sequence[float]
    verify: Sequence[float]
    draft_overhead: float
    round_overhead: float
    draft_wait: float = 0.0

    @property
    def target_only(self) -> float:
        """A round without a draft."""
        return self.round_overhead + self.verify[0]


def choose_k(
    accepted: Sequence[float], reached: Sequence[float], costs: RoundCosts, least_gain: float = 1.0
) -> tuple[int, float]:
    """Return the k with the most expected tokens per second, and that rate.

    `accepted[i]` is the probability that the first i + 1 draft tokens are all proposed and accepted, `reached[i]` that
    a proposal gets to position i before it ends early. A round with up to k emits 1 + sum(accepted[:k]) tokens
    (Leviathan et al., arXiv 2211.17192, equation 1, by position). k = 0, the target alone, must be beaten by the factor
    `least_gain`.
    """
    floor = 1 / costs.target_only
    best_k, best_rate = 0, floor
    tokens, ended_early, before = 1.0, 0.0, 1.0
    for k, (accept, reach) in enumerate(zip(accepted, reached, strict=True), start=1):
        if reach < _NEGLIGIBLE:
            break
        ended_early += (before - reach) * (costs.draft[k - 1] + costs.verify[k - 1])
        tokens += accept
        seconds = ended_early + reach * (costs.draft[k] + costs.verify[k])
        rate = tokens / (costs.round_overhead + costs.draft_overhead + seconds)
        if rate > max(best_rate, least_gain * floor):
            best_k, best_rate = k, rate
        before = reach
    return best_k, best_rate


def choose_matched(
    accepted: Sequence[float], costs: RoundCosts, num_sessions: int, after: tuple[int, float, float] | None = None
) -> tuple[int, float]:
    """Return how many tokens of a match a session proposes for the most expected tokens per second, and that rate.

    `accepted[i]` is the probability that the first i + 1 are accepted. They cost nothing but their verification, in a
    step that the session shares with `num_sessions` - 1 others, of which each has one token. `after` says of a proposal
    that they are to lengthen: its tokens, the expected ones, and the seconds of its round.
    """
    k, tokens, seconds = after or (0, float(num_sessions), costs.target_only)
    verify = dict(enumerate(costs.verify))
    before = interpolate(verify, k)
    best_length, best_rate = 0, tokens / seconds
    for length, accept in enumerate(accepted[: len(costs.verify) - 1 - k], start=1):
        tokens += accept
        rate = tokens / (seconds + interpolate(verify, k + length / num_sessions) - before)
        if rate > best_rate:
            best_length, best_rate = length, rate
    return best_length, best_rate / num_sessions


def stop_thresholds(costs: RoundCosts, rate: float, acceptance: float, k: int) -> list[float]:
    """Return, for i = 1 .. k - 1, the least probability of the first i tokens at which drafting on still pays.

    The draft looks at a confidence one token late, so a proposal that ends at i has i + 1 tokens. Going on to j tokens
    costs the draft steps and the added verify. It brings the tokens after i + 1, each accepted with probability
    `acceptance` after the others, and each worth 1 / rate seconds (Dinkelbach, 1967: what maximises a ratio). The
    threshold is the least over all j <= k, so that a step in the verify's cost can be crossed.
    """
    thresholds = []
    for i in range(1, k):
        least, tokens, probability = 1.0, 0.0, acceptance
        for j in range(i + 2, k + 1):
            probability *= acceptance
            tokens += probability
            added = costs.draft[j] - costs.draft[i + 1] + costs.verify[j] - costs.verify[i + 1]
            least = min(least, max(added, 0.0) * rate / tokens)
        thresholds.append(least if tokens else 0.0)
    return thresholds


def share_out(
    accepted: Mapping[Hashable, Sequence[float]], costs: RoundCosts, least_gain: float = 1.0
) -> dict[Hashable, int]:
    """Return the k of each of several sessions that share steps, for the most expected tokens per second of all.

    `accepted[session][i]` is as in `choose_k` and does not rise with i. In a shared round the draft takes as long as
    for the longest proposal, the target as for the mean length. So for each longest length, the likeliest tokens of
    all sessions come first, up to the best number of them.
    """
    n = len(accepted)
    p = np.array([p for own in accepted.values() for p in own])
    position = np.array([i for own in accepted.values() for i in range(len(own))], dtype=int)
    session = np.repeat(np.arange(n), [len(own) for own in accepted.values()])
    likeliest = np.lexsort((position, -p))
    likeliest = likeliest[p[likeliest] >= _NEGLIGIBLE]
    p, position, session = p[likeliest], position[likeliest], session[likeliest]
    verify = _between(costs.verify, np.arange(1, len(p) + 1) / n)
    best_rate = best_tokens = 0.0
    best = session[:0]
    for longest in range(1, 2 + position.max(initial=-1)):
        fixed = costs.round_overhead + costs.draft_overhead + costs.draft[longest]
        is_within = position < longest
        expected = np.cumsum(np.concatenate(([float(n)], p[is_within])))[1:]
        rates = expected / (fixed + verify[: len(expected)])
        last = rates.argmax()
        if rates[last] > best_rate:
            best_rate, best_tokens, best = rates[last], expected[last], session[is_within][: last + 1]
    # The wait decides whether to draft and not how far: longer proposals would make it longer, and it these.
    floor = least_gain * n / costs.target_only
    if len(best) and best_tokens / (best_tokens / best_rate + costs.draft_wait) <= floor:
        best = best[:0]
    return dict(zip(accepted, np.bincount(best, minlength=n).tolist(), strict=True))


def _between(values: Sequence[float], xs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values at 0 < x < len(values), interpolated as `interpolate` does."""
    ends = np.ceil(xs).astype(int)
    left, right = (np.asarray(values)[end] for end in (ends - 1, ends))
    between: NDArray[np.float64] = left + (right - left) * (xs - (ends - 1))
    return between

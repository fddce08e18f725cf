"""Margins: how clearly tokens are chosen.

Two passes over the same tokens give logits that differ by rounding, if they have different widths. So speculation,
which feeds k + 1 tokens at once, and the target alone can choose different tokens where the best two nearly tie. A
token is a *near tie* if its margin is below the bound of its position.

The bound is twice the largest change of a logit, because each of two scores can change by as much. The change is
measured on the loaded model (`specd/worker/model/rounding.py`) and scales with the largest logit of a position, as
rounding does. Float32 needs no rule of its own: a change there is about 1e-6 of the largest logit, so near ties are
rare. Where all widths give the same bits, the bound is 0, and nothing is a near tie.

Truncations are examined only where rounding is coarse (`COARSE_ROUNDING`), in 16 bits on a GPU. On a CPU that would
take several per cent of a verify, and in float32 the limits of truncations decide otherwise as rarely as true ties do.

Acceptance by REJECTION has no margins: its text depends on the draft and on k in any case.
"""

from __future__ import annotations

import math

import mlx.core as mx

from specd.sampling import Sampling

# The relative rounding of logits from which truncations count: far above that of float32, far below that of 16 bits.
COARSE_ROUNDING = 1e-4


def best_two(totals: mx.array, chosen: mx.array) -> mx.array:
    """Return, lazily, the best two of each row of scores with their noise [n, vocabulary_size]: [n, 2], the best first.

    `chosen` [n] is the best token of each row. A maximum of the others takes half of the time of `mx.topk`, or less.
    """
    column = chosen[:, None]
    others = mx.put_along_axis(totals, column, mx.array(-mx.inf), axis=-1)
    return mx.concatenate([mx.take_along_axis(totals, column, axis=-1), _highest(others)], axis=-1)


def confidence_of(best: mx.array) -> float:
    """Return the confidence in [0.5, 1] of the choice between the best two scores [1, 2] of a row.

    It is the best token's share of the two (a sigmoid of the margin between them). It predicts whether another model
    chooses the same token as well as the token's probability does, or better with noise, which both models share. And
    it needs no exponential of the whole vocabulary.
    """
    scores: list[list[float]] = best.tolist()  # type: ignore[assignment]
    [[one, other]] = scores
    return 1 / (1 + math.exp(other - one))


def near_tie_bounds(sampling: Sampling, largest: mx.array, logit_rounding: float) -> mx.array:
    """Return, lazily, the bounds [n] for the margins of choices from logits, of which the largest are `largest` [n].

    `logit_rounding` is the largest change of a logit by the width of a pass, relative to the row's largest logit.
    Transforms pass the change on: a repetition penalty multiplies or divides it, and so does the temperature.
    """
    gain = max(sampling.repetition_penalty, 1 / sampling.repetition_penalty) / (sampling.temperature or 1)
    return largest * (2 * logit_rounding * gain)


def choice_margins(
    sampling: Sampling,
    transformed: mx.array,
    scores: mx.array,
    noise: mx.array | None,
    chosen: mx.array,
    bounds: mx.array | None,
) -> mx.array:
    """Return, lazily, the margins [n] of the tokens [n] chosen by scores [n, vocabulary_size] with this noise.

    A margin is in units of the scores: the difference between the best two with their noise. It is less if a truncation
    of the `transformed` log-probabilities could have decided otherwise, by dropping the chosen token, or by keeping a
    *rival* that is better with its noise. Differences between scores change by at most `bounds` [n]; None leaves
    truncations out.
    """
    best = best_two(scores if noise is None else scores + noise, chosen)
    # With a grammar, other parameters can forbid all tokens: the scores are then infinite, or not a number.
    margins = mx.where(best[:, 0] > -mx.inf, best[:, 0] - best[:, 1], 0)
    if noise is None or bounds is None or not sampling.truncates:
        return margins
    bounds = bounds[:, None]
    change = bounds * sampling.temperature
    kept = scores > -mx.inf
    dropped = mx.where(kept, -mx.inf, transformed)
    slack_of = _Truncations(sampling, transformed, change).slack
    inside = slack_of(mx.take_along_axis(transformed, chosen[:, None], axis=-1), _highest(dropped), chosen)
    # The most likely rival is the first that a truncation would keep.
    reaches = dropped * (1 / sampling.temperature) + noise > best[:, :1] - bounds
    rival = _highest(mx.where(reaches, dropped, -mx.inf))
    limit: mx.array | float = -mx.inf
    if sampling.top_k > 0:
        lowest = mx.min(mx.where(kept, transformed, mx.inf), axis=-1, keepdims=True)
        is_full = mx.sum(kept, axis=-1, keepdims=True) >= sampling.top_k  # otherwise top_k has dropped nothing
        limit = mx.where(is_full, lowest, -mx.inf)
    outside = mx.where(rival == -mx.inf, mx.inf, -slack_of(rival, limit))
    to_truncations = mx.maximum(mx.minimum(inside, outside), 0) / sampling.temperature
    return mx.minimum(margins, to_truncations[:, 0])


class _Truncations:
    """The limits of a session's truncations of log-probabilities [n, vocabulary_size].

    Differences between log-probabilities change by at most `change` [n, 1].
    """

    def __init__(self, sampling: Sampling, transformed: mx.array, change: mx.array) -> None:
        self._sampling = sampling
        self._transformed = transformed
        self._change = change
        self._probabilities = mx.exp(transformed)

    def slack(self, token: mx.array, edge: mx.array | float, chosen: mx.array | None = None) -> mx.array:
        """Return how far a token's log-probability [n, 1] is inside of all limits, [n, 1]; negative if it is outside.

        `edge` is the nearest log-probability at the other side of top_k's limit. `chosen` is the token, if it is kept.
        For top_p the value is a difference of log-odds: if no difference of two log-probabilities changes by more than
        some value, neither do the log-odds of a set of tokens.
        """
        s, slacks = self._sampling, []
        if s.top_p < 1:
            # Tokens that nearly tie with this one may come before it or behind it.
            limit = token + self._change if chosen is None else token - self._change
            above = mx.where(self._transformed > limit, self._probabilities, 0)
            mass = mx.sum(above, axis=-1, keepdims=True)
            if chosen is not None:
                mass = mass - mx.where(token > limit, mx.exp(token), 0)
            mass = mx.clip(mass, 0, 1)
            slacks.append(math.log(s.top_p) - math.log1p(-s.top_p) - mx.log(mass) + mx.log1p(-mass))
        if s.min_p > 0:
            others = self._transformed
            if chosen is not None:
                others = mx.put_along_axis(others, chosen[:, None], mx.array(-mx.inf), axis=-1)
            slacks.append(token - _highest(others) - math.log(s.min_p))
        if 0 < s.top_k < self._transformed.shape[-1]:
            slacks.append(token - edge)
        return (
            mx.min(mx.concatenate(slacks, axis=-1), axis=-1, keepdims=True) if slacks else mx.full(token.shape, mx.inf)
        )


def _highest(values: mx.array) -> mx.array:
    """Return the highest of each row of values [n, m], [n, 1]."""
    return mx.max(values, axis=-1, keepdims=True)

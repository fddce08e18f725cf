"""Measurement of the rounding of a model's logits: what the width of a pass changes in them."""

from __future__ import annotations

import math
import time
from typing import Any

import mlx.core as mx

from specd.worker.engine.forward import BareCache, bare_cache, forward
from specd.worker.engine.jobs import Evaluate, Feed, Steps
from specd.worker.model.loader import LoadedModel

# Sessions in a pass, and the tokens of each. The last is a prompt: its chunks have any size.
_PASSES = ((1, 2), (1, 4), (1, 8), (4, 1), (4, 4), (1, 32))
_NUM_TOKENS = 32
_FEWEST_TOKENS = 8


def measure_rounding(model: LoadedModel, seconds: float) -> Steps[float]:
    """Return the largest change of a logit by the width of a pass, relative to the largest logit of the same position.

    A text is fed one token at a time, then from the beginning in passes of other widths and with several sessions, so
    that also the caches are those of such passes. The text is shorter if this would take more than about half of
    `seconds`.
    """
    size = model.info.vocabulary_size
    length = min(_NUM_TOKENS, model.info.context_length)
    text = [(7919 * i + 1) % size for i in range(length)]
    started_at = time.perf_counter()
    expected: list[mx.array] = []
    cache = trial_cache(model)
    for token_id in text:
        (logits,) = forward([Feed(cache, mx.array([token_id]))])
        expected.append(logits[:, :size].astype(mx.float32))
        yield Evaluate(expected[-1:])
        # All other passes together take about as long as these.
        if len(expected) >= _FEWEST_TOKENS and time.perf_counter() - started_at > seconds / 4:
            break
    text = text[: len(expected)]
    changes: list[float] = []
    for sessions, width in _PASSES:
        if sessions == 1 or model.batches:
            changes += yield from _changes(model, text, mx.concatenate(expected), sessions, width)
    # A model that gives NaN reports it in the answer to a request.
    return max(changes) if all(map(math.isfinite, changes)) else 0.0


def _changes(model: LoadedModel, text: list[int], expected: mx.array, sessions: int, width: int) -> Steps[list[float]]:
    """Return the largest relative change in each pass over `width` tokens of `sessions` sessions with this text."""
    caches = [trial_cache(model) for _ in range(sessions)]
    changes = []
    for start in range(0, len(text), width):
        rows = expected[start : start + width]
        scales = mx.max(mx.abs(rows), axis=-1, keepdims=True)
        tokens = mx.array(text[start : start + width])
        logits = mx.stack(forward([Feed(cache, tokens) for cache in caches]))[..., : rows.shape[-1]]
        change = mx.max(mx.abs(logits.astype(mx.float32) - rows) / scales)
        yield Evaluate([change])
        changes.append(float(change))
    return changes


def trial_cache(model: LoadedModel, **options: Any) -> BareCache:
    """Return an empty cache, for passes in the forms in which sessions are computed."""
    return bare_cache(model.network, batches=model.batches, static=model.static, sharing=model.sharing, **options)

"""The forms in which a network can compute on a GPU, and the choice of the fastest by a trial at load."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import structlog
from mlx.nn.layers.base import Module

from specd.worker.engine.forward import TrialPass, agree, bare_cache, forward, trial_logits
from specd.worker.engine.jobs import Feed
from specd.worker.engine.merged_products import merge_where_faster
from specd.worker.engine.shared_rows import Sharing
from specd.worker.engine.static_step import StaticStep

log = structlog.get_logger()

_CACHED_TOKENS, _PASSES, _STEPS, _TURNS, _SESSIONS = 128, 9, 16, 2, 8
# Several tokens, of which some are forgotten, and single ones.
_TRIAL: Sequence[TrialPass] = (
    ([[1, 2, 3, 4, 5], [6]], 0),
    ([[7, 8, 9], [1, 2]], 2),
    ([[3], [4, 5, 6]], 0),
    ([[1], [2]], 0),
)
# Buffers of shared rows take at most this part of the device's memory, for each length.
_SHARED_PART = 0.2


def choose_forms(
    network: Module, *, batches: bool, context_length: int, bytes_per_token: int
) -> tuple[StaticStep | None, Sharing | None]:
    """Choose how a network computes: with merged products, whole buffers (fixed.py), a compiled pass, and shared rows.

    Each is used where it gives the logits of mlx-lm's own form and is faster. No device or family is known by its name:
    kernels that are planned for each length, as in cuDNN, make the trial of mlx-lm's own form slow.
    """
    merge_where_faster(network, lambda: trial_logits(network, batches=batches), lambda: _decode_seconds(network))
    own = trial_logits(network, _TRIAL, batches=batches)
    own_seconds = _verify_seconds(network)
    network.fixed_shapes = True
    static = StaticStep(network, context_length, bytes_per_token) if StaticStep.suits(network) else None
    fixed_seconds = _tried_seconds(network, own, batches=batches)
    static_seconds = _tried_seconds(network, own, static=static) if static is not None else float("inf")
    seconds = {"own": own_seconds, "fixed": fixed_seconds, "compiled": static_seconds}
    log.info("tried forms of a verify", **{name: round(1000 * value, 2) for name, value in seconds.items()})
    if own_seconds <= min(fixed_seconds, static_seconds):
        network.fixed_shapes = False
        return None, None
    if static is None or fixed_seconds < static_seconds:
        return None, None
    singles: dict[bool, list[float]] = {True: [], False: []}
    for form, own_times in [*singles.items()] * _TURNS:
        static.compiles_one = form
        own_times.append(_decode_seconds(network, static=static))
    static.compiles_one = min(singles[True]) < min(singles[False])
    log.info(
        "tried forms of a decode",
        **{"compiled" if form else "own": round(1000 * min(own), 2) for form, own in singles.items()},
    )
    return static, _sharing(network, static, own, batches)


def _sharing(network: Module, static: StaticStep, own: mx.array, batches: bool) -> Sharing | None:
    if not static.shares:
        return None
    memory: Any = mx.device_info().get("memory_size", 0)
    sharing = Sharing(static, int(memory * _SHARED_PART))
    options = {"static": static, "batches": batches}
    shared_seconds = _tried_seconds(network, own, _SESSIONS, sharing=sharing, **options)
    one_by_one = _verify_seconds(network, _SESSIONS, **options)
    log.info("tried shared rows", shared=round(1000 * shared_seconds, 2), apart=round(1000 * one_by_one, 2))
    return sharing if shared_seconds < one_by_one else None


def _tried_seconds(network: Module, own: mx.array, num_sessions: int = 1, **options: Any) -> float:
    """Return the seconds of a verify in the form with these options, infinite if it fails or gives other logits."""
    try:
        is_right = agree(trial_logits(network, _TRIAL, **options), own)
        return _verify_seconds(network, num_sessions, **options) if is_right else float("inf")
    except Exception as error:  # models can raise any error on arrays as offsets, on masks and under mx.compile
        log.debug("the model cannot compute in this form", error=repr(error))
        return float("inf")


def _verify_seconds(network: Module, num_sessions: int = 1, **options: Any) -> float:
    """Return the seconds of a verify of four tokens for each session, at lengths that grow."""
    caches = [bare_cache(network, **options) for _ in range(num_sessions)]
    for cache in caches:
        mx.eval(forward([Feed(cache, mx.zeros(_CACHED_TOKENS, mx.uint32))]))
    seconds = []
    for _ in range(_PASSES):
        begun_at = time.perf_counter()
        mx.eval(forward([Feed(cache, mx.zeros(4, mx.uint32)) for cache in caches]))
        seconds.append(time.perf_counter() - begun_at)
        for cache in caches:
            cache.layers.rewind(cache.layers.num_fed - 3)
    return statistics.median(seconds[2:])


def _decode_seconds(network: Module, **options: Any) -> float:
    """Return the seconds of a token, each described while the last one is computed."""
    cache = bare_cache(network, **options)
    latest = mx.zeros(_CACHED_TOKENS, mx.uint32)
    for i in range(_STEPS + 8):
        if i == 8:
            mx.eval(latest)
            begun_at = time.perf_counter()
        latest = mx.argmax(forward([Feed(cache, latest)])[0][-1:], axis=-1).astype(mx.uint32)
        mx.async_eval(latest)
    mx.eval(latest)
    return (time.perf_counter() - begun_at) / _STEPS

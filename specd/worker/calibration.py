"""Measures what steps of the worker's model cost, and keeps that on disk for the next start."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import structlog
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from specd import __version__
from specd.step_costs import StepCosts
from specd.worker.batch import BareCache, Evaluate, Feed, forward
from specd.worker.engine import Steps
from specd.worker.model import LoadedModel
from specd.worker.user_cache import taking_turns, user_cache_directory

log = structlog.get_logger()

# Widths of a verify, the most telling first: what is left when the time is over is interpolated. Kernels change at
# multiples of four and eight, and next to them.
VERIFY_WIDTHS = (1, 8, 4, 2, 16, 5, 3, 6, 9, 12, 7, 10, 33, 24)
# A draft takes in its own last token, or that and the target's.
DRAFT_WIDTHS = (1, 2)

_BATCHED_WIDTHS = frozenset((1, 2, 4, 8))
_SESSIONS = (1, 2, 4, 16)
_PASSES = 4
_TURNS = 2  # what another process may take to measure is waited for, this many times what it should take
_CACHED_TOKENS = 128  # in each cache while steps are measured
_VERSION = "7"  # counted up when steps of the same model are computed in another way


def calibrate(model: LoadedModel, widths: Sequence[int], seconds: float) -> Steps[StepCosts]:
    """Measure steps by width and by number of sessions, for at most about so many seconds; yields nothing to others.

    What an earlier start of the same model, device and libraries measured is taken from the user's cache instead. The
    workers of a pair, which start together, take turns: measured side by side, a target seemed to take longer for one
    token than for seven.
    """
    path = _path(model, widths)
    known = _load(path)
    if known is not None:
        return known
    with taking_turns("calibration", timeout_seconds=_TURNS * seconds):
        costs = yield from _measure_curves(model, widths, seconds)
    keep(model, widths, costs)
    return costs


def _measure_curves(model: LoadedModel, widths: Sequence[int], seconds: float) -> Steps[StepCosts]:
    started_at = time.perf_counter()
    measured: dict[int, dict[int, float]] = {}
    cached_len = min(_CACHED_TOKENS, model.info.context_length // 2)
    fitting = [width for width in widths if cached_len + width <= model.info.context_length]
    several = _SESSIONS if model.batches else _SESSIONS[:1]
    caches: list[BareCache] = []
    for i, sessions in enumerate(several, start=1):
        while len(caches) < sessions:
            caches.append(BareCache(model.network, make_prompt_cache(model.network), model.batches))
            yield Evaluate([_feed(caches[-1:], cached_len)])
        those = [width for width in fitting if sessions == 1 or width in _BATCHED_WIDTHS]
        curve = yield from _measure_curve(caches[:sessions], those, started_at + seconds * i / len(several))
        if curve:
            measured[sessions] = curve
        if time.perf_counter() - started_at > 2 * seconds:
            break  # a model so slow that more of it would keep people waiting
    caches.clear()
    mx.clear_cache()
    costs = StepCosts(measured)
    log.info("calibrated", seconds=round(time.perf_counter() - started_at, 2), sessions=list(measured))
    return costs


def keep(model: LoadedModel, widths: Sequence[int], costs: StepCosts) -> None:
    """Leave the costs of a model's steps at these widths to the next start."""
    path = _path(model, widths)
    if path is None:
        return
    # Written beside and renamed: another worker may read it now.
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        partial.write_text(json.dumps(costs.measured))
        partial.rename(path)
    except OSError as error:
        log.warning("cannot keep what steps cost; the next start measures it again", path=str(path), error=str(error))
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _measure_curve(caches: Sequence[BareCache], widths: Sequence[int], until: float) -> Steps[dict[int, float]]:
    """Return the seconds of a step for these sessions by width, the least of a few that lie apart.

    What else the machine does makes steps longer only, and comes in stretches: another worker loads its model.
    """
    curve: dict[int, float] = {}
    for _ in range(_PASSES):
        for width in widths:
            # Two widths at least: one does not say what others take.
            if len(curve) >= 2 and time.perf_counter() >= until:
                return curve
            if width not in curve:
                yield from measure(caches, width)  # the first pass of a shape can be slow, for good
            curve[width] = min((yield from measure(caches, width)), curve.get(width, math.inf))
    return curve


def measure(caches: Sequence[BareCache], width: int) -> Steps[float]:
    """Return the seconds of a step for these sessions, all that there are, which then are as before."""
    begun_at = time.perf_counter()
    yield Evaluate([_feed(caches, width)])
    seconds = time.perf_counter() - begun_at
    for cache in caches:
        trim_prompt_cache(cache.layers, width)
    return seconds


def _feed(caches: Sequence[BareCache], width: int) -> mx.array:
    """Compute a step, lazily: each session takes in so many tokens."""
    logits = forward([Feed(cache, mx.zeros(width, mx.uint32)) for cache in caches])
    return mx.stack([mx.argmax(rows, axis=-1) for rows in logits])


def _path(model: LoadedModel, widths: Sequence[int]) -> Path | None:
    directory = user_cache_directory()
    if directory is None:
        return None
    machine = (platform.machine(), str(os.cpu_count()), str(sorted(widths)))
    versions = (_VERSION, __version__, version("mlx"), version("mlx-lm"))
    key = "\n".join((model.info.fingerprint, model.info.device, model.info.precision, *machine, *versions))
    return directory / f"step-costs-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _load(path: Path | None) -> StepCosts | None:
    if path is None:
        return None
    try:
        content = json.loads(path.read_text())
        return StepCosts({int(n): {int(w): float(s) for w, s in curve.items()} for n, curve in content.items()})
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever a damaged file can hold
        log.warning("cannot use the kept step costs, measuring again", path=str(path), error=repr(error))
        return None

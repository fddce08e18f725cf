"""Measurement of the worker's model: step times, and rounding. The results are kept on disk for the next start."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import structlog

from specd.step_costs import StepCosts
from specd.supervised import tell_supervisor
from specd.user_cache import taking_turns, user_cache_directory
from specd.version import __version__
from specd.worker.engine.forward import BareCache, forward
from specd.worker.engine.jobs import Evaluate, Feed, Steps
from specd.worker.heads.head import Head
from specd.worker.model import head_trial
from specd.worker.model.head_trial import HeadTrial
from specd.worker.model.loader import LoadedModel
from specd.worker.model.rounding import measure_rounding, trial_cache

log = structlog.get_logger()


@dataclass(frozen=True)
class Workload:
    """The sizes to measure, the most important first. Sizes that are left when the time is over are interpolated.

    A size is the width of a pass, or the number of draft tokens of a proposal: one pass over the draft's last token and
    the target's token, then one pass for each further token.
    """

    sizes: tuple[int, ...]
    proposes: bool = False

    def num_fed(self, size: int) -> int:
        """Return the number of tokens that are fed to a session."""
        return size + 1 if self.proposes else size

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of its passes."""
        return (2, 1) if self.proposes else self.sizes


@dataclass(frozen=True)
class Calibration:
    """The costs of a workload's steps, and for a target the rounding of its logits (`measure_rounding`)."""

    costs: StepCosts
    logit_rounding: float = 0.0


# Kernels change at multiples of four and eight, and next to them.
VERIFIES = Workload((1, 8, 4, 2, 16, 5, 3, 6, 9, 12, 7, 10, 33, 24))
PROPOSALS = Workload((1, 8, 4, 2), proposes=True)

BATCHED_SIZES = (1, 2, 4, 8)  # of passes for several sessions
_SESSIONS = (1, 2, 4, 16)
_PASSES = 4
_TURNS = 2  # wait for another process that measures, for this many calibration times
_CACHED_TOKENS = 128  # tokens in each cache, and in a source, while steps are measured
_VERSION = "12"  # increased when the steps of a model are computed differently


def calibrate(model: LoadedModel, workload: Workload, seconds: float) -> Steps[Calibration]:
    """Measure a workload by size and by number of sessions, for about this many seconds, without other jobs.

    Measuring the rounding of a target takes up to half as long again.

    Results of an earlier start with the same model, device and libraries come from the user's cache instead. The
    workers of a pair, which start together, take turns: when both measured at once, a target seemed slower with one
    token than with seven.
    """
    path = _path(model, repr(workload))
    known = _load(path)
    if known is not None:
        return known
    tell_supervisor(stage="calibrating")
    with taking_turns("calibration", timeout_seconds=_TURNS * seconds):
        started_at = time.perf_counter()
        costs = yield from measure_curves(model, workload, seconds)
        rounding = 0.0 if workload.proposes else (yield from measure_rounding(model, seconds))
    log.info(
        "calibrated",
        seconds=round(time.perf_counter() - started_at, 2),
        sessions=list(costs.measured),
        logit_rounding=f"{rounding:.1e}",
    )
    calibration = Calibration(costs, rounding)
    keep(model, workload, calibration)
    return calibration


def calibrate_rounding(model: LoadedModel, seconds: float) -> Steps[float]:
    """Measure the rounding of a model with an adapter, or return that of an earlier start.

    It takes up to half of this many seconds. Step costs are those of the model alone, to which low-rank layers add
    little.
    """
    path = _path(model, "rounding")
    if path is not None:
        with contextlib.suppress(OSError, ValueError):
            return float(path.read_text())
    rounding = yield from measure_rounding(model, seconds)
    log.info("measured the rounding of an adapter", adapter=model.info.name, logit_rounding=f"{rounding:.1e}")
    if path is not None:
        _write(path, repr(rounding))
    return rounding


def measure_curves(
    model: LoadedModel, workload: Workload, seconds: float, *, several: Sequence[int] = _SESSIONS
) -> Steps[StepCosts]:
    """Measure a workload by size, for each of `several` numbers of sessions that the model can compute together."""
    started_at = time.perf_counter()
    measured: dict[int, dict[int, float]] = {}
    context = model.info.context_length
    cached_len = min(_CACHED_TOKENS, context // 2, context - workload.num_fed(min(workload.sizes)))
    fitting = [size for size in workload.sizes if cached_len + workload.num_fed(size) <= context]
    caches: list[BareCache | HeadTrial] = []
    for i, sessions in enumerate(several if model.batches else several[:1], start=1):
        while len(caches) < sessions:
            caches.append((yield from _begin(model, cached_len)))
        sizes = [size for size in fitting if sessions == 1 or size in BATCHED_SIZES]
        # Half of the remaining time, because the costs of single sessions decide most plans.
        until = started_at + seconds * (1 - 0.5**i)
        curve = yield from _measure_curve(caches[:sessions], workload, sizes, until)
        if curve:
            measured[sessions] = curve
        if time.perf_counter() - started_at > 2 * seconds:
            break  # the model is so slow that more sessions would delay the start
    caches.clear()
    mx.clear_cache()
    return StepCosts(measured)


def _begin(model: LoadedModel, num_tokens: int) -> Steps[BareCache | HeadTrial]:
    """Return a session with this number of tokens."""
    if isinstance(model.network, Head):
        trial = HeadTrial(model.network, max(num_tokens, 1))
        yield from trial.read()
        return trial
    cache = trial_cache(model, source=[0] * _CACHED_TOKENS)
    if num_tokens:
        yield Evaluate([_feed([cache], num_tokens)])
    return cache


def keep(model: LoadedModel, workload: Workload, calibration: Calibration) -> None:
    """Keep the calibration of a model's workload for the next start."""
    path = _path(model, repr(workload))
    if path is not None:
        content = {"seconds": calibration.costs.measured, "logit_rounding": calibration.logit_rounding}
        _write(path, json.dumps(content))


def _write(path: Path, text: str) -> None:
    # Written under another name and renamed, because another worker may read the file now.
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        partial.write_text(text)
        partial.rename(path)
    except OSError as error:
        log.warning("cannot keep the calibration; the next start measures them again", path=str(path), error=str(error))
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _measure_curve(
    caches: Sequence[BareCache | HeadTrial], workload: Workload, sizes: Sequence[int], until: float
) -> Steps[dict[int, float]]:
    """Return seconds by size for these sessions: the least of a few measurements at different times.

    Other load on the machine only makes steps longer, and comes in stretches, such as another worker's loading.
    """
    curve: dict[int, float] = {}
    for _ in range(_PASSES):
        for size in sizes:
            # At least two sizes, because one does not show how the time grows.
            if len(curve) >= 2 and time.perf_counter() >= until:
                return curve
            if size not in curve:
                yield from measure(caches, workload, size)  # the first pass of a shape can be slow
            curve[size] = min((yield from measure(caches, workload, size)), curve.get(size, math.inf))
    return curve


def measure(caches: Sequence[BareCache | HeadTrial], workload: Workload, size: int) -> Steps[float]:
    """Return the seconds of a workload for these sessions, and rewind them."""
    trials = [each for each in caches if isinstance(each, HeadTrial)]
    bare = [each for each in caches if isinstance(each, BareCache)]
    for trial in trials:
        trial.rewind()
    begun_at = time.perf_counter()
    if trials:
        yield Evaluate([head_trial.propose(trials, size)])
    else:
        yield Evaluate([_propose(bare, size) if workload.proposes else _feed(bare, size)])
    seconds = time.perf_counter() - begun_at
    for cache in bare:
        cache.layers.rewind(cache.layers.num_fed - workload.num_fed(size))
    return seconds


def _propose(caches: Sequence[BareCache], num_draft_tokens: int) -> mx.array:
    """Propose tokens for each session, lazily, as a draft does."""
    latest = [mx.zeros(2, mx.uint32)] * len(caches)
    chosen: list[mx.array] = []
    for _ in range(num_draft_tokens):
        outputs = forward([Feed(cache, ids) for cache, ids in zip(caches, latest, strict=True)])
        latest = [mx.argmax(rows[-1:], axis=-1) for rows in outputs]
        chosen += latest
    return mx.concatenate(chosen)


def _feed(caches: Sequence[BareCache], width: int) -> mx.array:
    """Feed this many tokens to each session, in one pass, lazily."""
    outputs = forward([Feed(cache, mx.zeros(width, mx.uint32)) for cache in caches])
    return mx.stack([mx.argmax(rows, axis=-1) for rows in outputs])


def _path(model: LoadedModel, what: str) -> Path | None:
    """Return the file for a measurement of a model."""
    directory = user_cache_directory()
    if directory is None:
        return None
    machine = (platform.machine(), str(os.cpu_count()), what)
    versions = (_VERSION, __version__, version("mlx"), version("mlx-lm"))
    key = "\n".join((model.info.fingerprint, model.info.device, model.info.precision, *machine, *versions))
    return directory / f"step-costs-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _load(path: Path | None) -> Calibration | None:
    if path is None:
        return None
    try:
        content = json.loads(path.read_text())
        curves = content["seconds"].items()
        costs = StepCosts({int(n): {int(w): float(s) for w, s in curve.items()} for n, curve in curves})
        rounding = float(content["logit_rounding"])
        assert 0 <= rounding < math.inf
        return Calibration(costs, rounding)
    except FileNotFoundError:
        return None
    except Exception as error:  # a damaged file can cause any error
        log.warning("cannot use the kept calibration, measuring again", path=str(path), error=repr(error))
        return None

"""The load of a worker's models, and their preparation: adapters, warm-up, calibration."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import mlx.core as mx
import structlog

from specd.errors import StartupError
from specd.identity.certificates import Certificates
from specd.model_info import pair_conflict
from specd.settings import TargetWorkerSettings, WorkerSettings
from specd.supervised import tell_supervisor
from specd.vocabulary import OWN_HEAD
from specd.worker.engine.forward import BareCache, bare_cache, forward
from specd.worker.engine.jobs import Evaluate, Feed, Steps
from specd.worker.engine.shared_rows import SLOTS, Sharing
from specd.worker.heads.head import Head
from specd.worker.model.adapter_files import AdapterFiles, read_adapters
from specd.worker.model.calibration import (
    BATCHED_SIZES,
    PROPOSALS,
    Calibration,
    Workload,
    calibrate,
    calibrate_rounding,
    measure,
)
from specd.worker.model.directory import find
from specd.worker.model.files import is_head
from specd.worker.model.fingerprint import whole_fingerprint
from specd.worker.model.head_trial import HeadTrial
from specd.worker.model.loader import LoadedModel, load
from specd.worker.model.sharding import Shard
from specd.worker.ranks.gathering import Gathering
from specd.worker.ranks.ranks import Ranks
from specd.worker.sampling.sampler import NonFiniteLogitsError
from specd.worker.session.proposal import rehearse as rehearse_proposal

log = structlog.get_logger()

# A GPU plans each new width, which takes 0.1 s for 36 layers on an H100, and has kernels for tiles of these sizes: CUDA
# compiles those for quantised weights at their first use, for half a minute each. Within a session, that would break
# every deadline.
_TILES_ON_GPU = (16, 32, 64, 128, 256)
# The most seconds for the first passes of each width and length of buffers, and for those of several sessions.
_REHEARSAL_SECONDS = 8.0


@dataclass(frozen=True)
class LoadedWorker:
    """A worker's model with its measurements, and a target's own draft: a model, or its head.

    `adapter_roundings` are the roundings of the logits of the model with each adapter.
    """

    model: LoadedModel
    fingerprint: Future[str]
    calibration: Calibration
    draft: tuple[LoadedModel, Calibration] | None
    ranks: Ranks | None = None
    adapter_roundings: Mapping[str, float] = field(default_factory=dict)


def load_worker(
    settings: WorkerSettings,
    certificates: Certificates | None,
    blas: str,
    workload: Workload,
    rehearse: Callable[[LoadedModel], Steps[None]],
    self_draft: str,
    ranks: TargetWorkerSettings | None,
) -> Steps[LoadedWorker]:
    """Load and prepare the models of a worker; see `run_worker`. Raises StartupError."""
    if ranks is not None:
        return (yield from _load_part(ranks, certificates, blas, workload, rehearse))
    adapters = read_adapters(settings.adapters, settings.model)  # before a load that takes long
    self_draft = _beside_adapters(self_draft, adapters)
    has_head = self_draft == OWN_HEAD or (self_draft and is_head(find(self_draft)))
    model = _read(settings, settings.model, blas, head=self_draft if has_head else "", adapters=adapters)
    fingerprint = whole_fingerprint(model.files)  # in the background
    draft = _read(settings, self_draft, blas) if self_draft and not has_head else None
    if draft is not None:
        _check_pair(model, draft)
    calibration = yield from _prepare(settings, model, workload, rehearse)
    roundings = yield from _prepare_adapters(settings, model, workload, rehearse)
    own_draft = None
    if draft is not None:
        own_draft = draft, (yield from _prepare(settings, draft, PROPOSALS, rehearse_proposal))
    elif model.head is not None:
        log.info("the target drafts with a head", head=model.head.info.name)
        own_draft = model.head, (yield from _prepare(settings, model.head, PROPOSALS, None))
    return LoadedWorker(model, fingerprint, calibration, own_draft, adapter_roundings=roundings)


def _beside_adapters(self_draft: str, adapters: Sequence[AdapterFiles]) -> str:
    """Return the draft of a target with adapters, which cannot be a head: a head knows the states of the model alone.

    Raises StartupError for a head that was asked for.
    """
    if not (adapters and self_draft):
        return self_draft
    if self_draft == OWN_HEAD:
        log.info("a head of the model, if it has one, is not used beside adapters")
        return ""
    if is_head(find(self_draft)):
        raise StartupError(
            f"{self_draft} is a head, which cannot draft for sessions with adapters: leave out --adapters, or set "
            "--self-draft none"
        )
    return self_draft


def _load_part(
    settings: TargetWorkerSettings,
    certificates: Certificates | None,
    blas: str,
    workload: Workload,
    rehearse: Callable[[LoadedModel], Steps[None]],
) -> Steps[LoadedWorker]:
    """Load rank 0's part of a model, together with the followers."""
    tell_supervisor(stage="waiting for followers")
    gathering = Gathering(settings, certificates)
    model = _read(settings, settings.model, blas, part=gathering.part)
    fingerprint = whole_fingerprint(model.files)
    others = gathering.ranks(fingerprint)
    others.attach(model.network)
    calibration = yield from _prepare(settings, model, workload, rehearse)
    others.costs = calibration.costs
    return LoadedWorker(model, fingerprint, calibration, None, others)


def _read(
    settings: WorkerSettings,
    name: str,
    blas: str,
    *,
    head: str = "",
    part: Shard | None = None,
    adapters: Sequence[AdapterFiles] = (),
) -> LoadedModel:
    log.info("loading", model=name, blas=blas)
    tell_supervisor(stage="loading")
    quantised = {"kv_bits": settings.kv_bits, "kv_group_size": settings.kv_group_size}
    return load(name, blas=blas, is_optimized=True, head=head, part=part, adapters=adapters, **quantised)


def _check_pair(target: LoadedModel, draft: LoadedModel) -> None:
    """Raise StartupError if a draft cannot propose for a target."""
    if conflict := pair_conflict(target.info, draft.info):
        raise StartupError(conflict)


def _prepare(
    settings: WorkerSettings,
    model: LoadedModel,
    workload: Workload,
    rehearse: Callable[[LoadedModel], Steps[None]] | None,
) -> Steps[Calibration]:
    tell_supervisor(stage="warming up")
    yield from warm_up(model, workload.widths, rehearse)
    return (yield from calibrate(model, workload, settings.calibration_seconds))


def _prepare_adapters(
    settings: WorkerSettings,
    model: LoadedModel,
    workload: Workload,
    rehearse: Callable[[LoadedModel], Steps[None]] | None,
) -> Steps[dict[str, float]]:
    """Warm up a model with each of its adapters; return the rounding of a target's logits by adapter."""
    roundings = {}
    for name, adapted in model.adapters.items():
        yield from warm_up(adapted, workload.widths, rehearse)
        if not workload.proposes:
            roundings[name] = yield from calibrate_rounding(adapted, settings.calibration_seconds)
    return roundings


def warm_up(
    model: LoadedModel, widths: Sequence[int], rehearse: Callable[[LoadedModel], Steps[None]] | None
) -> Steps[None]:
    """Run each kind of computation once: a job of the worker, if there is one, and on a GPU passes of these widths."""
    started_at = time.perf_counter()
    passes: Sequence[int] = ()
    if mx.default_device().type != mx.cpu:
        passes = (*widths, *_TILES_ON_GPU)
        log.info("warming up: the first time on a machine this compiles kernels, which can take minutes")
    for width in passes:
        if width > model.info.context_length:
            continue
        if isinstance(model.network, Head):
            yield from HeadTrial(model.network, width).read()
        else:
            cache = bare_cache(model.network, batches=model.batches, static=model.static)
            yield from measure([cache], Workload((width,)), width)
    if model.static is not None:
        model.static.rehearse(_REHEARSAL_SECONDS)
    if model.sharing is not None:
        yield from _rehearse_sharing(model, model.sharing)
    # A model that gives NaN reports it in the answer to a request.
    if rehearse is not None:
        with contextlib.suppress(NonFiniteLogitsError):
            yield from rehearse(model)
    mx.clear_cache()
    log.info("warmed up", seconds=round(time.perf_counter() - started_at, 2))


def _rehearse_sharing(model: LoadedModel, sharing: Sharing) -> Steps[None]:
    """Compute shared passes of all numbers of slots, in buffers of the first length."""
    ends_at = time.perf_counter() + _REHEARSAL_SECONDS
    caches: list[BareCache] = []
    for num_sessions in SLOTS:
        while len(caches) < num_sessions:
            caches.append(bare_cache(model.network, batches=model.batches, static=model.static, sharing=sharing))
            yield Evaluate(forward([Feed(caches[-1], mx.zeros(1, mx.uint32))]))
        for width in BATCHED_SIZES:
            if time.perf_counter() < ends_at:
                yield from measure(caches, Workload((width,)), width)
    caches.clear()
    sharing.release_unshared()

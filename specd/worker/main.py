"""The life of a worker process: load, serve until a signal, stop."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import grpc
import mlx.core as mx
import structlog

from specd.cache_footprint import CacheFootprint
from specd.identity.certificates import load_certificates
from specd.identity.roles import Role
from specd.machine import available_memory
from specd.rpc.access import Guard
from specd.rpc.deferred import Deferred
from specd.rpc.metrics_endpoint import MetricsEndpoint, add_build_info, new_registry
from specd.rpc.server import Server
from specd.settings import TargetWorkerSettings, WorkerSettings
from specd.v1 import model_pb2_grpc
from specd.worker.cpu.scheduling_policy import schedule_in_batches
from specd.worker.engine.engine import Engine
from specd.worker.engine.jobs import Steps
from specd.worker.engine.prefill_chunk import PrefillChunk
from specd.worker.engine.scheduler import StepTime
from specd.worker.loading import LoadedWorker, load_worker
from specd.worker.model.calibration import Workload, keep
from specd.worker.model.loader import LoadedModel
from specd.worker.model_service import ModelService
from specd.worker.ranks.ranks import Ranks
from specd.worker.session.capacity import CacheCapacity
from specd.worker.session.head_draft import HeadDraft
from specd.worker.session.memory_watch import MemoryWatch
from specd.worker.session.metrics import WorkerMetrics
from specd.worker.session.prefix_cache import PrefixCache
from specd.worker.session.self_draft import ModelDraft, SelfDraft
from specd.worker.session.stream import Worker

log = structlog.get_logger()

# The time after which the engine's thread yields Python to the event loop. The default of 5 ms is as long as a step of
# a draft, and messages of other sessions would come a step late (eight sessions measured 4 to 7 % faster).
_SWITCH_SECONDS = 0.0005
# The time after which idle followers learn which sessions have ended.
_FLUSH_SECONDS = 1.0
# The most seconds that a start waits for the fingerprint of the whole model.
_FINGERPRINT_SECONDS = 1.0


async def run_worker(
    settings: WorkerSettings,
    *,
    process: Role,
    service_name: str,
    blas: str,
    workload: Workload,
    rehearse: Callable[[LoadedModel], Steps[None]],
    add_services: Callable[[Deferred[Worker], grpc.aio.Server], None],
    self_draft: str = "",
    ranks: TargetWorkerSettings | None = None,
) -> None:
    """Run a worker process. Raises StartupError when it cannot start.

    `self_draft` is the model or the head with which a target worker proposes tokens itself, OWN_HEAD the head in its
    model's own files, and "" nothing. With `ranks`, the settings of a target worker, followers hold parts of its model.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    on_cpu = mx.default_device().type == mx.cpu
    if on_cpu:
        schedule_in_batches()
    certificates = load_certificates(settings, role=process)
    guard = Guard(process, listen=settings.listen, certificates=certificates)
    services = service_name, "specd.v1.ModelService", "specd.v1.MultiplexService"
    server = Server(settings.listen, services, guard)
    deferred = Deferred[Worker](f"the model {settings.model} to load")
    add_services(deferred, server.grpc)
    model_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(deferred), server.grpc)
    registry = new_registry()
    with MetricsEndpoint(settings.metrics_listen, registry, certificates) as endpoint:
        # Before the load, which can be a long download: a port in use is an error at once, and health is NOT_SERVING.
        await server.start()
        # Without clear_streams the process aborts when the thread ends. A failed engine answers no request, so the
        # process ends, and its supervisor restarts it.
        engine = Engine(mx.clear_streams, on_failure=lambda: os._exit(1))
        stopping: asyncio.Future[Any] = asyncio.ensure_future(server.wait_for_stop())
        chunk = PrefillChunk(settings.prefill_chunk_seconds, has_few_sizes=not on_cpu)
        loading: asyncio.Future[Any] = engine.submit(
            load_worker(settings, certificates, blas, workload, rehearse, self_draft, ranks)
        )
        await asyncio.wait({stopping, loading}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            os._exit(0)  # no state is lost, and this is the only way to interrupt a download
        try:
            loaded: LoadedWorker = loading.result().result
            model, costs = loaded.model, loaded.calibration.costs
            facts = {"model": model.info.name, "device": model.info.device, "precision": model.info.precision}
            add_build_info(registry, process, **{**facts, "model": model.info.public_name})
            footprints = [model.cache_footprint, *([loaded.draft[0].cache_footprint] if loaded.draft else [])]
            caches = CacheCapacity(settings.cache_bytes, CacheFootprint.total(footprints))
            prefixes, drafting = _share_prefix_cache(settings, loaded, on_cpu=on_cpu)
            metrics = WorkerMetrics(registry, caches, prefixes)

            engine.on_step = _observer(workload, loaded, metrics, chunk, drafting)
            engine.expect(costs.fixed_seconds)
            engine.drafts = drafting is not None
            # For all but large models the fingerprint is ready by now, or nearly.
            await asyncio.wait({asyncio.wrap_future(loaded.fingerprint)}, timeout=_FINGERPRINT_SECONDS)
            deferred.set(
                Worker(
                    engine,
                    model,
                    caches,
                    prefixes,
                    metrics,
                    chunk,
                    costs,
                    runs_ahead=not on_cpu and loaded.ranks is None,  # a plan has the tokens as numbers
                    whole_fingerprint=loaded.fingerprint,
                    logit_rounding=loaded.calibration.logit_rounding,
                    adapter_roundings=loaded.adapter_roundings,
                    self_draft=drafting,
                )
            )
            facts |= _beside(model, drafting)
            await server.set_serving(True)
            server.announce(metrics_address=endpoint.address, metrics_url=endpoint.url, **facts)
            # A draft computes its prefixes again in less time.
            kept = [drafting.prefixes, prefixes] if isinstance(drafting, ModelDraft) else [prefixes]
            watching = [*map(asyncio.ensure_future, _watches(settings, engine, caches, kept, loaded.ranks))]
            await stopping
            for watch in watching:
                watch.cancel()
            keep(model, workload, loaded.calibration)
        finally:
            await server.stop(settings.shutdown_grace_seconds)
            await asyncio.to_thread(engine.stop)  # it waits for the running step
            if loading.done() and not loading.exception() and (others := loading.result().result.ranks) is not None:
                others.close()


def _beside(model: LoadedModel, drafting: SelfDraft | None) -> dict[str, str]:
    """Return the facts about what computes beside a model."""
    adapters = {"adapters": ", ".join(model.adapters)} if model.adapters else {}
    return adapters | ({"draft": drafting.info.name} if drafting is not None else {})


def _watches(
    settings: WorkerSettings,
    engine: Engine,
    caches: CacheCapacity,
    prefixes: Sequence[PrefixCache],
    ranks: Ranks | None,
) -> Iterator[Coroutine[Any, Any, None]]:
    """Return what runs beside the sessions; the first of the prefix caches is freed first."""
    available = available_memory if ranks is None else lambda: ranks.available_bytes(available_memory())
    reserve_bytes = settings.memory_reserve_bytes
    yield end_if_stuck(engine, settings.hang_seconds, lambda: os._exit(1))
    yield MemoryWatch(engine, caches, prefixes, reserve_bytes=reserve_bytes, available=available).run()
    if ranks is not None:
        yield _flush(engine, ranks)


async def _flush(engine: Engine, ranks: Ranks) -> None:
    """Let idle followers drop what this process has dropped."""
    while True:
        await asyncio.sleep(_FLUSH_SECONDS)
        engine.run_soon(ranks.flush)


def _observer(
    workload: Workload, loaded: LoadedWorker, metrics: WorkerMetrics, chunk: PrefillChunk, drafting: SelfDraft | None
) -> Callable[[StepTime], None]:
    """Return what learns from the engine's steps."""
    network, costs = loaded.model.network, loaded.calibration.costs
    chunks = {id(each.network): chunk for each in loaded.model.with_adapters}
    if isinstance(drafting, ModelDraft):
        chunks[id(drafting.model.network)] = drafting.chunk

    def observe(step: StepTime) -> None:
        metrics.count_step(step)
        if step.is_prefill:
            if not step.reads_source and id(step.network) in chunks:  # a head reads the target's chunks
                chunks[id(step.network)].took(step.num_tokens, step.seconds)
        # The curve for one session is measured with all cores, so other steps do not refresh it.
        elif (
            not workload.proposes
            and step.is_whole
            and step.network is network
            and (step.had_all_cores or step.num_sessions > 1)
        ):
            costs.observe(step.num_sessions, step.num_tokens / step.num_sessions, step.seconds)

    return observe


def _share_prefix_cache(
    settings: WorkerSettings, loaded: LoadedWorker, *, on_cpu: bool
) -> tuple[PrefixCache, SelfDraft | None]:
    """Return the prefix cache of the target, and its draft.

    A draft model's prefix cache has the same number of tokens in the budget. A head's pairs are with the target's.
    """
    if loaded.draft is None:
        return PrefixCache(settings.prefix_cache_bytes), None
    draft, calibration = loaded.draft
    if draft is loaded.model.head:
        return PrefixCache(settings.prefix_cache_bytes), HeadDraft(draft.info, calibration.costs)
    of_draft, of_target = (each.cache_footprint.bytes_for(1) for each in (draft, loaded.model))
    share = settings.prefix_cache_bytes * of_draft // (of_draft + of_target)
    chunk = PrefillChunk(settings.prefill_chunk_seconds, has_few_sizes=not on_cpu)
    drafting = ModelDraft(draft, calibration.costs, PrefixCache(share), chunk)
    return PrefixCache(settings.prefix_cache_bytes - share), drafting


async def end_if_stuck(engine: Engine, seconds: float, end: Callable[[], None]) -> None:
    """Call `end` when a step takes longer than `seconds`, because the device hangs.

    The supervisor of the process (`specd up`, Docker or launchd) restarts it, and its sessions continue there.
    """
    while engine.busy_seconds < seconds:  # noqa: ASYNC110 - the other thread raises no event
        await asyncio.sleep(min(seconds / 10, 1.0))
    log.error("a step hangs, ending the process", seconds=round(engine.busy_seconds, 1))
    end()

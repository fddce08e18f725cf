"""The life of a follower's process: join, read a part of the model, compute every step with rank 0."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future

import mlx.core as mx
import structlog

from specd.identity.certificates import Certificates, load_certificates
from specd.identity.roles import Role
from specd.lifeline import Lifeline
from specd.machine import available_memory
from specd.settings import TargetWorkerSettings
from specd.supervised import tell_supervisor
from specd.v1.ranks_pb2 import Beat, Meeting, RankMessage, StepAck
from specd.worker.cpu.scheduling_policy import schedule_in_batches
from specd.worker.model.directory import find
from specd.worker.model.fingerprint import quick_fingerprint, whole_fingerprint
from specd.worker.model.loader import load
from specd.worker.model.sharding import Shard
from specd.worker.ranks.connection import RankConnection
from specd.worker.ranks.data_plane import check_backend, join_collectives
from specd.worker.ranks.interpreter import PlanInterpreter
from specd.worker.ranks.joining import join, join_request
from specd.worker.ranks.watch import Watch, end_process

log = structlog.get_logger()


async def run_follower(settings: TargetWorkerSettings, *, blas: str) -> None:
    """Follow rank 0 until it stops, or until a signal. Raises StartupError."""
    if mx.default_device().type == mx.cpu:
        schedule_in_batches()
    certificates = load_certificates(settings, role=Role.TARGET_WORKER)
    life = Lifeline()
    life.open()
    loop = asyncio.get_running_loop()
    ended: Future[None] = Future()

    def announce(rank: int) -> None:
        facts = {"model": settings.model, "metrics_address": "", "metrics_url": ""}
        loop.call_soon_threadsafe(lambda: life.announce(f"rank {rank} of {settings.follow}", **facts))

    def run() -> None:
        error: BaseException | None = None
        try:
            _follow(settings, certificates, blas, announce)
        except BaseException as raised:
            error = raised
        mx.clear_streams()  # or the process aborts when the thread ends
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    threading.Thread(target=run, name="mlx-owner", daemon=True).start()
    following, stopping = asyncio.wrap_future(ended), asyncio.ensure_future(life.wait_for_stop())
    await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if following.done():
        following.result()
        stopping.cancel()
    else:
        os._exit(0)  # the thread may wait for rank 0, which sees this end, and ends all ranks


def _follow(
    settings: TargetWorkerSettings,
    certificates: Certificates | None,
    blas: str,
    announce: Callable[[int], None],
) -> None:
    directory = find(settings.model)
    own = join_request(
        quick_fingerprint(directory),
        mx.default_device().type.name,
        rank=settings.rank,
        data_host=settings.rank_host,
    )
    watch = Watch(settings.hang_seconds)
    tell_supervisor(stage="joining")
    connection, welcome = join(settings.follow, own, certificates, watch)
    connection.when_lost(end_process)
    check_backend(welcome.backend)
    group = join_collectives(welcome.rank, welcome.data_addresses, welcome.backend)

    def meet(facts: str) -> None:
        watch.clear()
        connection.send(RankMessage(meeting=Meeting(facts=facts)))
        connection.receive()
        watch.allow(welcome.hang_seconds, "the first passes of the model")

    log.info("loading", model=settings.model, blas=blas, rank=welcome.rank)
    part = Shard(group, welcome.backend, meet)
    model = load(settings.model, blas=blas, kv_bits=welcome.kv_bits, kv_group_size=welcome.kv_group_size, part=part)
    watch.clear()
    watch.silence_seconds = welcome.deadline_seconds
    fingerprint = whole_fingerprint(model.files)
    watch.describe = lambda: Beat(
        available_bytes=available_memory(), whole_fingerprint=fingerprint.result() if fingerprint.done() else ""
    )
    announce(welcome.rank)
    _serve(connection, PlanInterpreter(model), watch)
    watch.close()
    connection.close()


def _serve(connection: RankConnection, interpreter: PlanInterpreter, watch: Watch) -> None:
    """Compute what rank 0 plans, until it says goodbye."""
    while (message := connection.receive()).WhichOneof("kind") != "goodbye":
        plan = message.plan
        with watch.within(plan.deadline_ms / 1000 if plan.feeds else watch.silence_seconds, f"step {plan.step}"):
            try:
                checksum = interpreter.run(plan)
            except Exception as error:
                end_process(f"step {plan.step} failed: {error!r}")
                raise
        if checksum is not None:
            connection.send(RankMessage(ack=StepAck(step=plan.step, checksum=checksum)))

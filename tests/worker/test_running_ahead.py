"""A target that runs ahead, through its service and its engine: the same texts for any next request."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import mlx.core as mx
import pytest
from prometheus_client import CollectorRegistry

from specd.cache_footprint import CacheFootprint
from specd.rpc.deferred import Deferred
from specd.step_costs import StepCosts
from specd.v1 import target_pb2, target_pb2_grpc
from specd.worker.engine.engine import Engine
from specd.worker.session.capacity import CacheCapacity
from specd.worker.session.metrics import WorkerMetrics
from specd.worker.session.prefix_cache import PrefixCache
from specd.worker.session.stream import Worker
from target_worker.service import TargetService
from tests.worker.driving import Chunks
from tests.worker.models import TINY_VOCABULARY_SIZE, tiny_model

MODEL = tiny_model()
PROMPT = [1, 2, 3, 4, 5]
NUM_TOKENS = 40


@pytest.fixture
async def verify(tmp_path: Path) -> AsyncIterator[Any]:
    """The method of a served target that runs ahead."""
    engine, prefixes = Engine(mx.clear_streams), PrefixCache(10**9)
    caches = CacheCapacity(10**9, CacheFootprint({1: 1}))
    metrics = WorkerMetrics(CollectorRegistry(), caches, prefixes)
    costs = StepCosts({1: {1: 0.01}})
    worker = Deferred[Worker]("the model")
    worker.set(Worker(engine, MODEL, caches, prefixes, metrics, Chunks(512), costs, runs_ahead=True))
    server = grpc.aio.server()
    target_pb2_grpc.add_TargetServiceServicer_to_server(TargetService(worker), server)
    server.add_insecure_port(f"unix:{tmp_path / 'target'}")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path / 'target'}") as channel:
        yield target_pb2_grpc.TargetServiceStub(channel).Verify
    await server.stop(None)
    engine.stop()


def greedy(count: int) -> list[int]:
    tokens = [*PROMPT]
    for _ in range(count):
        tokens.append(mx.argmax(MODEL.network(mx.array([tokens]))[0, -1]).item())  # type: ignore[arg-type]
    return tokens


async def decode(verify: Any, *, seed: int | None) -> list[int]:
    """Decode with proposals, repetitions and rewinds in between, by chance; with none without a seed."""
    draw = random.Random(seed)
    call = verify()
    tokens, cached = [*PROMPT], 0
    number = 0
    while len(tokens) < len(PROMPT) + NUM_TOKENS:
        number += 1
        event = draw.random() if seed is not None else 1.0
        position = draw.randint(0, cached) if event < 0.1 else cached
        proposal = [draw.randrange(TINY_VOCABULARY_SIZE) for _ in range(3)] if 0.1 <= event < 0.3 else []
        request = target_pb2.VerifyRequest(
            round=number, position=position, token_ids=tokens[position:], proposal=proposal
        )
        await call.write(request)
        if 0.3 <= event < 0.5:  # the same again, before or after the answer
            number += 1
            request.round = number
            await call.write(request)
        while (answer := await call.read()).round != number:
            pass
        cached = len(tokens) + answer.num_accepted
        tokens += [*proposal[: answer.num_accepted], answer.next_token_id]
    await call.done_writing()
    return tokens[: len(PROMPT) + NUM_TOKENS]


async def test_a_session_without_proposals_gets_the_greedy_text(verify: Any) -> None:
    assert await decode(verify, seed=None) == greedy(NUM_TOKENS)


@pytest.mark.parametrize("seed", range(6))
async def test_proposals_repetitions_and_rewinds_in_between_do_not_change_it(verify: Any, seed: int) -> None:
    assert await decode(verify, seed=seed) == greedy(NUM_TOKENS)


async def test_the_next_session_reuses_only_tokens_that_were_committed(verify: Any) -> None:
    for seed in (None, 0, None):
        assert await decode(verify, seed=seed) == greedy(NUM_TOKENS)

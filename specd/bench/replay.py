"""A draft that replays the target's own texts with a set error rate, to predict the speed of a pair."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from specd.bench.contenders import Specd
from specd.bench.setup import SPECD, Setup
from specd.client import NO_RETRIES, AsyncClient
from specd.rpc.channel import open_channel
from specd.rpc.messages import INCARNATION
from specd.supervisor import Child, Stack
from specd.v1 import draft_pb2, draft_pb2_grpc, model_pb2, model_pb2_grpc

_MOST_SESSIONS, _MOST_TOKENS = 16, 32
_INCARNATION = "replay"  # it has one life


class ReplayedDraft(draft_pb2_grpc.DraftServiceServicer, model_pb2_grpc.ModelServiceServicer):
    """A draft worker without a model: it proposes the next tokens of the text that a session is about to repeat.

    Each token is wrong with probability 1 - acceptance, and takes `step_seconds`. Its confidence is the acceptance.
    """

    def __init__(
        self, target: model_pb2.Model, texts: Mapping[tuple[int, ...], Sequence[int]], acceptance: float, step: float
    ) -> None:
        """Replay `texts`: prompts, with the tokens of prompt and answer."""
        self._target = target
        self._texts = texts
        self._acceptance = acceptance
        self._step_seconds = step
        self._random = random.Random(0)

    async def Describe(  # noqa: N802
        self, request: model_pb2.DescribeRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> model_pb2.DescribeResponse:
        """Describe a draft with the target's vocabulary, and the cost of its proposals."""
        costs = [
            model_pb2.StepCost(sessions=sessions, width=width, seconds=width * self._step_seconds)
            for sessions in (1, _MOST_SESSIONS)
            for width in (1, _MOST_TOKENS)
        ]
        model = model_pb2.Model()
        model.CopyFrom(self._target)
        model.name = f"replayed text, {self._acceptance:g} accepted"
        return model_pb2.DescribeResponse(model=model, step_costs=costs, incarnation=_INCARNATION)

    async def Propose(  # noqa: N802
        self,
        request_iterator: AsyncIterator[draft_pb2.ProposeRequest],
        context: grpc.aio.ServicerContext[draft_pb2.ProposeRequest, draft_pb2.ProposeResponse],
    ) -> AsyncIterator[draft_pb2.ProposeResponse]:
        """Serve one session."""
        await context.send_initial_metadata(((INCARNATION, _INCARNATION),))
        source: list[int] = []
        tokens: list[int] = []
        async for request in request_iterator:
            tokens[request.position :] = request.token_ids
            source = source or list(request.source_token_ids)
            # The recorded text of an encoder-decoder has no start token.
            said = [*source, *tokens[1:]] if source else tokens
            proposal = self._propose(said, request.num_draft_tokens, request.min_confidences)
            seconds = len(proposal) * self._step_seconds
            await asyncio.sleep(seconds)
            yield draft_pb2.ProposeResponse(
                round=request.round,
                token_ids=proposal,
                cached_len=len(tokens),
                confidences=[self._acceptance] * len(proposal),
                time=model_pb2.WorkerTime(compute_seconds=seconds),
            )

    def _propose(self, tokens: Sequence[int], k: int, min_confidences: Sequence[float]) -> list[int]:
        text = next((own for prompt, own in self._texts.items() if prompt == (*tokens[: len(prompt)],)), ())
        wanted = [*text[len(tokens) : len(tokens) + k]]
        for i, least in enumerate(min_confidences):
            if self._acceptance < least:
                del wanted[i:]
                break
        size = self._target.vocabulary_size
        return [t if self._random.random() < self._acceptance else (t + 1) % size for t in wanted]


@asynccontextmanager
async def replaying(
    stack: Stack,
    client: AsyncClient,
    prompt_ids: Mapping[str, Sequence[int]],
    *,
    max_tokens: int,
    acceptance: float,
    step_seconds: float,
) -> AsyncIterator[AsyncClient]:
    """Record the target's answers to the prompts, then connect to a coordinator with the same target worker.

    Its draft replays these answers.
    """
    alone = Specd(client, Setup(SPECD, 0))
    texts = {
        tuple(ids): [*ids, *(await alone.decode(name, 0, [*ids], max_tokens)).token_ids]
        for name, ids in prompt_ids.items()
    }
    target = stack.target.facts["address"]
    async with open_channel(target) as channel:
        described = await model_pb2_grpc.ModelServiceStub(channel).Describe(model_pb2.DescribeRequest())
    with TemporaryDirectory(prefix="specd-") as directory:
        sockets = Path(directory)
        server = grpc.aio.server()
        draft = ReplayedDraft(described.model, texts, acceptance, step_seconds)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(draft, server)
        servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        await servicer.set("specd.v1.DraftService", health_pb2.HealthCheckResponse.SERVING)
        server.add_insecure_port(f"unix:{sockets / 'draft'}")
        await server.start()
        addresses = ["--target", target, "--draft", f"unix:{sockets / 'draft'}", "--listen", f"unix:{sockets / 'own'}"]
        command = [sys.executable, "-m", "specd", "coordinator", *addresses, "--metrics-listen", "none"]
        coordinator = Child("coordinator", command, {})
        try:
            await coordinator.start()
            async with AsyncClient(f"unix:{sockets / 'own'}", retries=NO_RETRIES) as own:
                yield own
        finally:
            await coordinator.stop()
            await server.stop(None)

"""A draft that replays the target's own texts with a set error rate, to predict the speed of a pair.

It takes a set time for each token, or computes the passes of a real draft and replaces the tokens.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from specd.bench.contenders import Specd
from specd.bench.setup import SPECD, Setup
from specd.child import Child
from specd.client import NO_RETRIES, AsyncClient
from specd.protocol import PROTOCOL
from specd.rpc.channel import open_channel
from specd.rpc.messages import INCARNATION
from specd.supervisor import Stack
from specd.v1 import draft_pb2, draft_pb2_grpc, model_pb2, model_pb2_grpc
from specd.version import __version__

_MOST_SESSIONS, _MOST_TOKENS = 16, 32
_INCARNATION = "replay"  # it has one life
_LEAST_SECONDS = 1e-6  # the coordinator refuses a step that costs nothing

# Prompts, with the tokens of prompt and answer.
Texts = Mapping[tuple[int, ...], Sequence[int]]


class ReplayedDraft(draft_pb2_grpc.DraftServiceServicer, model_pb2_grpc.ModelServiceServicer):
    """A draft worker that proposes the next tokens of the text that a session is about to repeat.

    Each token is wrong with probability 1 - acceptance. Its confidence is the acceptance. Without a model, a token
    takes `step_seconds`. With the channel of a real draft worker, `draft`, that worker answers each request too: the
    answer keeps its times and lengths, and gets the replayed tokens. The cache of the real draft then holds its own
    tokens where the session has accepted others, which changes no cost.
    """

    def __init__(
        self,
        target: model_pb2.Model,
        texts: Texts,
        acceptance: float,
        step: float = 0.0,
        draft: grpc.aio.Channel | None = None,
    ) -> None:
        """Replay `texts` to sessions of the target."""
        self._target = target
        self._texts = texts
        self._acceptance = acceptance
        self._step_seconds = step
        self._draft = draft
        self._random = random.Random(0)

    async def Describe(  # noqa: N802
        self, request: model_pb2.DescribeRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> model_pb2.DescribeResponse:
        """Describe a draft with the target's vocabulary, and the cost of its proposals."""
        model = model_pb2.Model()
        model.CopyFrom(self._target)
        model.name = f"replayed text, {self._acceptance:g} accepted"
        costs: Sequence[model_pb2.StepCost] = [
            model_pb2.StepCost(sessions=sessions, width=width, seconds=width * max(self._step_seconds, _LEAST_SECONDS))
            for sessions in (1, _MOST_SESSIONS)
            for width in (1, _MOST_TOKENS)
        ]
        if self._draft is not None:
            costs = (await _describe(self._draft)).step_costs
        return model_pb2.DescribeResponse(
            model=model, step_costs=costs, incarnation=_INCARNATION, version=__version__, protocol=PROTOCOL
        )

    async def Propose(  # noqa: N802
        self,
        request_iterator: AsyncIterator[draft_pb2.ProposeRequest],
        context: grpc.aio.ServicerContext[draft_pb2.ProposeRequest, draft_pb2.ProposeResponse],
    ) -> AsyncIterator[draft_pb2.ProposeResponse]:
        """Serve one session."""
        await context.send_initial_metadata(((INCARNATION, _INCARNATION),))
        real = draft_pb2_grpc.DraftServiceStub(self._draft).Propose() if self._draft is not None else None
        source: list[int] = []
        tokens: list[int] = []
        try:
            async for request in request_iterator:
                tokens[request.position :] = request.token_ids
                source = source or list(request.source_token_ids)
                # The recorded text of an encoder-decoder has no start token.
                said = [*source, *tokens[1:]] if source else tokens
                proposal = self._propose(said, request.num_draft_tokens, request.min_confidences)
                if real is None:
                    answer = await self._wait(len(tokens), len(proposal))
                else:
                    answer = await _compute(real, request, len(proposal))
                answer.round = request.round
                answer.token_ids[:] = proposal
                answer.confidences[:] = [self._acceptance] * len(proposal)
                tokens += proposal  # a later request begins behind those of them that the target accepts
                yield answer
        finally:
            if real is not None:
                real.cancel()

    async def _wait(self, cached_len: int, num_tokens: int) -> draft_pb2.ProposeResponse:
        """Return an answer after the time that a proposal of this many tokens takes."""
        seconds = num_tokens * self._step_seconds
        await asyncio.sleep(seconds)
        return draft_pb2.ProposeResponse(
            cached_len=cached_len, time=model_pb2.WorkerTime(compute_seconds=seconds, num_sessions=1)
        )

    def _propose(self, tokens: Sequence[int], k: int, min_confidences: Sequence[float]) -> list[int]:
        text = next((own for prompt, own in self._texts.items() if prompt == (*tokens[: len(prompt)],)), ())
        wanted = [*text[len(tokens) : len(tokens) + k]]
        product = 1.0
        for i, least in enumerate(min_confidences, start=1):
            product *= self._acceptance
            if product < least:
                del wanted[i:]
                break
        size = self._target.vocabulary_size
        return [t if self._random.random() < self._acceptance else (t + 1) % size for t in wanted]


async def _compute(real: Any, request: draft_pb2.ProposeRequest, num_tokens: int) -> draft_pb2.ProposeResponse:
    """Return the answer of a real draft that proposes this many tokens, however sure it is of them."""
    asked = draft_pb2.ProposeRequest()
    asked.CopyFrom(request)
    asked.num_draft_tokens = num_tokens
    asked.min_confidences[:] = [0.0] * len(request.min_confidences)
    await real.write(asked)
    answer: draft_pb2.ProposeResponse = await real.read()
    return answer


async def _describe(channel: grpc.aio.Channel) -> model_pb2.DescribeResponse:
    response: model_pb2.DescribeResponse = await model_pb2_grpc.ModelServiceStub(channel).Describe(
        model_pb2.DescribeRequest()
    )
    return response


async def record(
    client: AsyncClient, prompt_ids: Mapping[str, Sequence[int]], *, max_tokens: int, ignore_eos: bool = False
) -> Texts:
    """Return the target's own answers to the prompts."""
    alone = Specd(client, Setup(SPECD, 0), ignore_eos=ignore_eos)
    return {
        tuple(ids): [*ids, *(await alone.decode(name, 0, [*ids], max_tokens)).token_ids]
        for name, ids in prompt_ids.items()
    }


@asynccontextmanager
async def replaying(
    stack: Stack,
    texts: Texts,
    *,
    acceptance: float,
    step_seconds: float = 0.0,
    computes: bool = False,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[AsyncClient]:
    """Connect to a coordinator with the target worker of `stack`, and a draft that replays these texts.

    If it `computes`, the draft worker of the stack computes the passes; otherwise a token takes `step_seconds`.
    `environment` is added to that of the coordinator.
    """
    target = stack.target.facts["address"]
    async with AsyncExitStack() as running:
        described = await _describe(await running.enter_async_context(open_channel(target)))
        real = None
        if computes:
            assert stack.draft is not None
            real = await running.enter_async_context(open_channel(stack.draft.facts["address"]))
        sockets = Path(running.enter_context(TemporaryDirectory(prefix="specd-")))
        server = grpc.aio.server()
        draft = ReplayedDraft(described.model, texts, acceptance, step_seconds, real)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(draft, server)
        servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        await servicer.set("specd.v1.DraftService", health_pb2.HealthCheckResponse.SERVING)
        server.add_insecure_port(f"unix:{sockets / 'draft'}")
        await server.start()
        running.push_async_callback(server.stop, None)
        addresses = ["--target", target, "--draft", f"unix:{sockets / 'draft'}", "--listen", f"unix:{sockets / 'own'}"]
        command = [sys.executable, "-m", "specd", "coordinator", *addresses, "--metrics-listen", "none"]
        coordinator = Child("coordinator", command, environment or {})
        running.push_async_callback(coordinator.stop)
        await coordinator.start()
        yield await running.enter_async_context(AsyncClient(f"unix:{sockets / 'own'}", retries=NO_RETRIES))

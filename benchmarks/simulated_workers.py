"""Workers without a model: the real protocol, and steps that take a set time, shared by all that ask in time.

    python benchmarks/simulated_workers.py target --listen unix:PATH [--step-seconds 0.03]
    python benchmarks/simulated_workers.py draft --listen unix:PATH [--step-seconds 0.005]

They have the tokenizer of the included target. Each token is a digest of its position and of the one before, so all
such targets give the same text. The draft is right about four tokens of five. `benchmarks/replicas.py` starts them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from specd.protocol import PROTOCOL
from specd.rpc.messages import INCARNATION
from specd.rpc.multiplex_service import MultiplexService
from specd.settings import EMBEDDED_TARGET
from specd.v1 import (
    draft_pb2,
    draft_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    multiplex_pb2_grpc,
    target_pb2,
    target_pb2_grpc,
)

VOCABULARY_SIZE = 8000
_CHUNK_BYTES = 1 << 20
_MOST_SESSIONS = 1024


def next_token(position: int, last: int) -> int:
    """Return the target's choice at a position after a token."""
    return (position * 7919 + last * 104729 + 12345) % VOCABULARY_SIZE


class _SimulatedWorker(model_pb2_grpc.ModelServiceServicer):
    """Answers every request of a step at the end of the next step."""

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self.incarnation = secrets.token_hex(8)
        self._tokenizer = (Path(EMBEDDED_TARGET) / "tokenizer.json").read_bytes()
        self._step_ends = asyncio.Event()

    async def steps(self) -> None:
        """Compute for ever."""
        while True:
            await asyncio.sleep(self._step_seconds)
            self._step_ends.set()
            self._step_ends = asyncio.Event()

    async def Describe(
        self, request: model_pb2.DescribeRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> model_pb2.DescribeResponse:
        """Describe a model in which every step takes the same time."""
        return model_pb2.DescribeResponse(
            protocol=PROTOCOL,
            model=model_pb2.Model(
                name="simulated",
                architecture="none",
                fingerprint="simulated",
                whole_fingerprint="simulated",
                vocabulary_fingerprint="simulated",
                vocabulary_size=VOCABULARY_SIZE,
                context_length=32768,
                precision="none",
                device="none",
            ),
            step_costs=[
                model_pb2.StepCost(sessions=n, width=width, seconds=self._step_seconds)
                for n in (1, _MOST_SESSIONS)
                for width in (1, 33)
            ],
            cache_capacity_bytes=1 << 40,
            cache_parts=[model_pb2.CachePart(most_tokens=1 << 40, bytes_per_token=1)],
            incarnation=self.incarnation,
            kernel_class="simulated",
            prefix_cache_bytes=1 << 20,
            multiplexes=True,
        )

    async def GetTokenizer(
        self, request: model_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[model_pb2.GetTokenizerResponse]:
        """Send the tokenizer."""
        for start in range(0, len(self._tokenizer), _CHUNK_BYTES):
            yield model_pb2.GetTokenizerResponse(chunk=self._tokenizer[start : start + _CHUNK_BYTES])

    async def serve(self, context: Any) -> None:
        """Serve one session."""
        await context.send_initial_metadata(((INCARNATION, self.incarnation),))
        while (request := await context.read()) is not grpc.aio.EOF:
            await self._step_ends.wait()
            await context.write(self._answer(request))

    def _answer(self, request: Any) -> Any:
        """Return the answer to a request of the worker's method."""
        raise NotImplementedError

    def _time(self) -> model_pb2.WorkerTime:
        return model_pb2.WorkerTime(compute_seconds=self._step_seconds, num_sessions=1, step_tokens=1)


class SimulatedTarget(_SimulatedWorker, target_pb2_grpc.TargetServiceServicer):
    """Chooses each token by a digest."""

    async def Verify(
        self,
        request_iterator: AsyncIterator[target_pb2.VerifyRequest],
        context: grpc.aio.ServicerContext[target_pb2.VerifyRequest, target_pb2.VerifyResponse],
    ) -> None:
        """Serve one session."""
        await self.serve(context)

    def _answer(self, request: target_pb2.VerifyRequest) -> target_pb2.VerifyResponse:
        length, last = request.position + len(request.token_ids), request.token_ids[-1]
        accepted = 0
        for token in request.proposal:
            if token != next_token(length + accepted, last):
                break
            accepted, last = accepted + 1, token
        return target_pb2.VerifyResponse(
            round=request.round,
            num_accepted=accepted,
            next_token_id=next_token(length + accepted, last),
            cached_len=length + len(request.proposal),
            margins=[],
            time=self._time(),
        )


class SimulatedDraft(_SimulatedWorker, draft_pb2_grpc.DraftServiceServicer):
    """Proposes the target's choices, of which every fifth is wrong."""

    async def Propose(
        self,
        request_iterator: AsyncIterator[draft_pb2.ProposeRequest],
        context: grpc.aio.ServicerContext[draft_pb2.ProposeRequest, draft_pb2.ProposeResponse],
    ) -> None:
        """Serve one session."""
        await self.serve(context)

    def _answer(self, request: draft_pb2.ProposeRequest) -> draft_pb2.ProposeResponse:
        length, last = request.position + len(request.token_ids), request.token_ids[-1]
        proposal = list[int]()
        for position in range(length, length + request.num_draft_tokens):
            last = (next_token(position, last) + (position % 5 == 0)) % VOCABULARY_SIZE
            proposal.append(last)
        return draft_pb2.ProposeResponse(
            round=request.round,
            token_ids=proposal,
            cached_len=length + max(len(proposal) - 1, 0),
            time=self._time(),
            confidences=[1.0] * len(proposal) if request.min_confidences else (),
        )


async def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["target", "draft"])
    parser.add_argument("--listen", required=True)
    parser.add_argument("--step-seconds", type=float, help="(default: 0.03 for a target, 0.005 for a draft)")
    options = parser.parse_args()
    server = grpc.aio.server()
    worker: SimulatedTarget | SimulatedDraft
    if options.kind == "target":
        worker = SimulatedTarget(options.step_seconds or 0.03)
        target_pb2_grpc.add_TargetServiceServicer_to_server(worker, server)
        parse: Any = target_pb2.VerifyRequest.FromString
    else:
        worker = SimulatedDraft(options.step_seconds or 0.005)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(worker, server)
        parse = draft_pb2.ProposeRequest.FromString
    multiplexing = MultiplexService(lambda: worker.incarnation, worker.serve, parse)
    multiplex_pb2_grpc.add_MultiplexServiceServicer_to_server(multiplexing, server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(worker, server)
    statuses = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(statuses, server)
    await statuses.set(f"specd.v1.{options.kind.capitalize()}Service", health_pb2.HealthCheckResponse.SERVING)
    server.add_insecure_port(options.listen)
    await server.start()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stepping = asyncio.ensure_future(worker.steps())
    await stop.wait()
    stepping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await stepping
    await server.stop(1)


if __name__ == "__main__":
    asyncio.run(main())

"""A target worker without a model: the real protocol, and steps that take a set time, shared by all that ask in time.

    python benchmarks/simulated_target.py --listen unix:PATH [--step-seconds 0.03]

It has the tokenizer of the included target. Each token is a digest of its position and of the one before, so all such
targets give the same text. `benchmarks/replicas.py` starts it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from specd.rpc.messages import INCARNATION
from specd.settings import EMBEDDED_TARGET
from specd.v1 import model_pb2, model_pb2_grpc, target_pb2, target_pb2_grpc

VOCABULARY_SIZE = 8000
_CHUNK_BYTES = 1 << 20
_MOST_SESSIONS = 1024


def next_token(position: int, last: int) -> int:
    """Return the target's choice at a position after a token."""
    return (position * 7919 + last * 104729 + 12345) % VOCABULARY_SIZE


class SimulatedTarget(target_pb2_grpc.TargetServiceServicer, model_pb2_grpc.ModelServiceServicer):
    """Answers every request of a step at the end of the next step."""

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._incarnation = secrets.token_hex(8)
        self._tokenizer = (Path(EMBEDDED_TARGET) / "tokenizer.json").read_bytes()
        self._step_ends = asyncio.Event()
        self._num_waiting = 0

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
            incarnation=self._incarnation,
            kernel_class="simulated",
            prefix_cache_bytes=1 << 20,
        )

    async def GetTokenizer(
        self, request: model_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[model_pb2.GetTokenizerResponse]:
        """Send the tokenizer."""
        for start in range(0, len(self._tokenizer), _CHUNK_BYTES):
            yield model_pb2.GetTokenizerResponse(chunk=self._tokenizer[start : start + _CHUNK_BYTES])

    async def Verify(
        self,
        request_iterator: AsyncIterator[target_pb2.VerifyRequest],
        context: grpc.aio.ServicerContext[target_pb2.VerifyRequest, target_pb2.VerifyResponse],
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        """Serve one session."""
        await context.send_initial_metadata(((INCARNATION, self._incarnation),))
        async for request in request_iterator:
            await self._step_ends.wait()
            length, last = request.position + len(request.token_ids), request.token_ids[-1]
            accepted = 0
            for token in request.proposal:
                if token != next_token(length + accepted, last):
                    break
                accepted, last = accepted + 1, token
            yield target_pb2.VerifyResponse(
                round=request.round,
                num_accepted=accepted,
                next_token_id=next_token(length + accepted, last),
                cached_len=length + len(request.proposal),
                margins=[],
                time=model_pb2.WorkerTime(compute_seconds=self._step_seconds, num_sessions=1, step_tokens=1),
            )


async def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--step-seconds", type=float, default=0.03)
    options = parser.parse_args()
    server = grpc.aio.server()
    target = SimulatedTarget(options.step_seconds)
    target_pb2_grpc.add_TargetServiceServicer_to_server(target, server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(target, server)
    statuses = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(statuses, server)
    await statuses.set("specd.v1.TargetService", health_pb2.HealthCheckResponse.SERVING)
    server.add_insecure_port(options.listen)
    await server.start()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stepping = asyncio.ensure_future(target.steps())
    await stop.wait()
    stepping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await stepping
    await server.stop(1)


if __name__ == "__main__":
    asyncio.run(main())

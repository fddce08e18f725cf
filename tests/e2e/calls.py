"""Calls to the processes of a stack, with their answers and refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from specd.child import Child
from specd.v1.draft_pb2 import ProposeRequest
from specd.v1.sampling_pb2 import (
    SessionSampling,
)
from tests.e2e.processes import PATIENCE_SECONDS, read_metric

# Numbers of the embedded pair.
VOCABULARY_SIZE = 8192
CONTEXT_LENGTH = 2048
END_TOKEN = 0


async def responses_to(call: AsyncIterator[Any]) -> list[Any]:
    async with asyncio.timeout(PATIENCE_SECONDS):
        return [response async for response in call]


async def error_of(call: AsyncIterator[Any]) -> grpc.aio.AioRpcError:
    """Read a stream that must end with an error."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await responses_to(call)
    return raised.value


class WorkerStream:
    """A session's stream to one of the workers, and the two services alike: token ids and a number of draft tokens.

    To the target the draft tokens are the same ones each time, so its answers depend on nothing but the request.
    """

    def __init__(self, call: grpc.aio.StreamStreamCall[Any, Any], kind: type[Message]) -> None:
        self.call = call
        self._kind = kind

    async def send(
        self,
        token_ids: Sequence[int],
        *,
        position: int = 0,
        num_draft_tokens: int = 4,
        round_: int = 1,
        sampling: SessionSampling | None = None,
    ) -> None:
        fields: dict[str, Any] = {"round": round_, "position": position, "token_ids": token_ids, "sampling": sampling}
        if self._kind is ProposeRequest:
            fields["num_draft_tokens"] = num_draft_tokens
        else:
            fields["proposal"] = [5] * num_draft_tokens
        await self.call.write(self._kind(**fields))

    async def receive(self) -> Any:
        """Return the next answer, or EOF, without what depends on the past: its times, and what was cached before."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            response: Any = await self.call.read()
        if response is not grpc.aio.EOF:
            response.ClearField("time")
            response.ClearField("reused_len")
            if "margins" in response.DESCRIPTOR.fields_by_name:
                response.ClearField("margins")  # their last bits depend on the passes
        return response

    async def ask(self, token_ids: Sequence[int], *, position: int = 0) -> Any:
        await self.send(token_ids, position=position)
        return await self.receive()

    async def error(self) -> grpc.aio.AioRpcError:
        """Read to the error that ends the stream."""
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            while await self.receive() is not grpc.aio.EOF:
                pass
        return raised.value


class Worker:
    """One of the two workers of the shared stack."""

    def __init__(self, child: Child, open_call: grpc.aio.StreamStreamMultiCallable[Any, Any], kind: type[Message]):
        self.child = child
        self._open_call = open_call
        self._kind = kind

    def open_stream(self) -> WorkerStream:
        return WorkerStream(self._open_call(), self._kind)

    async def ask_on_a_new_stream(self, token_ids: Sequence[int]) -> Any:
        stream = self.open_stream()
        answer = await stream.ask(token_ids)
        stream.call.cancel()
        return answer

    def active_sessions(self) -> float:
        return read_metric(self.child, "specd_worker_active_sessions")

    def superseded_requests(self) -> float:
        return read_metric(self.child, "specd_worker_requests_total", outcome="superseded")

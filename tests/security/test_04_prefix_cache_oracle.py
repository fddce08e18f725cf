"""Check 4: what a worker has cached of one client's prompts tells another nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from specd.errors import error_info
from specd.rpc.channel import open_channel
from specd.supervisor import Stack
from specd.v1.draft_pb2 import ProposeRequest
from specd.v1.draft_pb2_grpc import DraftServiceStub
from specd.v1.target_pb2 import VerifyRequest
from specd.v1.target_pb2_grpc import TargetServiceStub
from tests.e2e.processes import draft_of

PROMPT = [(7 * index) % 800 + 5 for index in range(200)]


class Worker:
    """One of the workers, asked about prompts as the coordinator asks."""

    def __init__(self, call: Any, kind: Any) -> None:
        self._call = call
        self._kind = kind

    async def reused(self, prompt: list[int], namespace: bytes) -> int:
        """Begin and end a session with a prompt; return how many of its tokens were there before."""
        stream = self._call()
        await stream.write(self._kind(round=1, token_ids=prompt, namespace=namespace))
        response = await stream.read()
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        return int(response.reused_len)

    async def refusal(self, *requests: Any) -> str:
        """Return the reason that ends a stream with these requests."""
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in self._call(iter([self._kind(**request) for request in requests])):
                pass
        return error_info(error.value).reason


@pytest.fixture(params=["draft", "target"])
async def worker(request: pytest.FixtureRequest, stack: Stack) -> AsyncIterator[Worker]:
    child = draft_of(stack) if request.param == "draft" else stack.target
    async with open_channel(child.facts["address"]) as channel:
        if request.param == "draft":
            yield Worker(DraftServiceStub(channel).Propose, ProposeRequest)
        else:
            yield Worker(TargetServiceStub(channel).Verify, VerifyRequest)


async def test_a_prompt_is_found_in_its_own_namespace_and_in_no_other(worker: Worker) -> None:
    for namespace in (b"", b"one", b"two"):
        assert await worker.reused(PROMPT, namespace) == 0
    for namespace in (b"", b"one", b"two"):
        assert await worker.reused([*PROMPT, 5], namespace) > 150
    assert await worker.reused([*PROMPT, 5], b"three") == 0


async def test_a_namespace_is_given_once_and_is_short(worker: Worker) -> None:
    first = {"token_ids": [5], "namespace": b"one"}
    assert await worker.refusal(first, {"token_ids": [5], "namespace": b"two"}) == "CONTRADICTION"
    assert await worker.refusal({"token_ids": [5], "namespace": b"x" * 65}) == "OUT_OF_RANGE"

"""The second answer to a request for a verdict: the target's own draft tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from coordinator.core import Part, SessionSetup
from coordinator.workers.errors import WorkerError, WorkerLateError
from coordinator.workers.stream import GrpcTargetStream
from specd.sampling import Sampling
from specd.v1.target_pb2 import SelfProposal, VerifyRequest, VerifyResponse
from tests.unit.test_worker_stream import LIFE, Call, has_ended


def stream_over(call: Call) -> GrpcTargetStream:
    """Return a stream over a call of the test's."""
    return GrpcTargetStream(call, SessionSetup("s", Sampling(), namespace=b""), LIFE)


class LaterCall(Call):
    """A call to a worker that answers when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.coming: asyncio.Queue[Any] = asyncio.Queue()

    async def read(self) -> Any:
        return await self.coming.get()


def verdict(number: int) -> VerifyResponse:
    return VerifyResponse(round=number, next_token_id=1)


def second(number: int, *token_ids: int, fault: str = "", confidences: Sequence[float] = ()) -> VerifyResponse:
    proposal = SelfProposal(token_ids=token_ids, fault=fault, confidences=confidences)
    return VerifyResponse(round=number, self_proposal=proposal)


def ask(*answers: VerifyResponse, asks_twice: bool = True, seconds: float = 5.0) -> Part:
    """Send a request on a new stream, and return the part that comes after its verdict."""

    async def exchange() -> Part:
        stream = stream_over(Call(*answers))
        try:
            await stream._send(VerifyRequest(token_ids=[1]), 5.0, asks_twice=asks_twice)
            await stream._receive(5.0)
            return await stream.proposal(seconds)
        finally:
            stream.close()
            await has_ended(stream)

    return asyncio.run(exchange())


def test_it_has_the_tokens() -> None:
    part = ask(verdict(1), second(1, 4, 5, confidences=[0.5, 1.0]))
    assert (part.token_ids, part.confidences, part.fault) == ([4, 5], [0.5, 1.0], "")
    assert part.from_target


def test_without_a_request_for_it_there_are_none() -> None:
    assert ask(verdict(1), asks_twice=False).token_ids == ()


@pytest.mark.parametrize(("said", "fault"), [("CONTEXT_EXCEEDED", "DRAFT_CONTEXT_EXCEEDED"), ("<b>x", "DRAFT_FAILED")])
def test_a_fault_is_one_of_the_known_reasons(said: str, fault: str) -> None:
    """Reasons become labels of metrics."""
    assert ask(verdict(1), second(1, fault=said)).fault == fault


def test_one_that_does_not_come_is_late() -> None:
    with pytest.raises(WorkerLateError):
        ask(verdict(1), seconds=0.01)


@pytest.mark.parametrize(
    ("answers", "asks_twice"),
    [
        ([second(1, 4)], True),
        ([second(1, 4), verdict(1)], True),
        ([second(2, 4), verdict(1)], True),
        ([verdict(1), second(1, 4)], False),
        ([verdict(1), second(1, 4), second(1, 5)], True),
        ([verdict(1), second(1, *range(33))], True),
    ],
    ids=["without a verdict", "before the verdict", "of a later round", "not asked for", "twice", "too long"],
)
def test_one_that_cannot_be_ends_the_stream(answers: list[VerifyResponse], asks_twice: bool) -> None:
    async def exchange() -> None:
        stream = stream_over(Call(*answers))
        try:
            await stream._send(VerifyRequest(token_ids=[1]), 5.0, asks_twice=asks_twice)
            await stream._receive(5.0)
            await stream.proposal(5.0)
            await has_ended(stream)
            await stream._send(VerifyRequest(token_ids=[2]), 5.0)
        finally:
            stream.close()

    with pytest.raises(WorkerError) as raised:
        asyncio.run(exchange())
    assert raised.value.reason == "TARGET_BROKEN"


def test_one_of_a_superseded_request_is_dropped() -> None:
    """It may come before the verdict of the next request, or never."""

    async def exchange(*answers: VerifyResponse) -> Part:
        call = LaterCall()
        stream = stream_over(call)
        await stream._send(VerifyRequest(token_ids=[1]), 5.0, asks_twice=True)
        call.coming.put_nowait(verdict(1))
        await stream._receive(5.0)
        await stream._send(VerifyRequest(token_ids=[2]), 5.0, asks_twice=True)
        for answer in answers:
            call.coming.put_nowait(answer)
        await stream._receive(5.0)
        part = await stream.proposal(5.0)
        call.coming.put_nowait(grpc.aio.EOF)
        stream.close()
        await has_ended(stream)
        return part

    for answers in ([second(1, 3), verdict(2), second(2, 4)], [verdict(2), second(2, 4)]):
        assert asyncio.run(exchange(*answers)).token_ids == [4]

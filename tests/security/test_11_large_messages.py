"""Check 11: a message is no longer than its method needs, also when it is unpacked."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from specd.errors import error_info
from specd.supervisor import Stack
from specd.v1.generation_pb2 import Chat, ChatMessage, GenerateRequest
from specd.v1.session_pb2 import GetSessionRequest
from specd.v1.session_pb2_grpc import SessionServiceStub
from tests.e2e.calls import error_of
from tests.e2e.processes import PATIENCE_SECONDS
from tests.raw_client import RawClient
from tests.security.standing import Standing

GENERATE = "/specd.v1.GenerationService/Generate"
TOO_LONG = GenerateRequest(text="x" * 5 * 2**20)
BOMB = GenerateRequest(text="\0" * 60 * 2**20)


@pytest.mark.parametrize("request_", [TOO_LONG, BOMB], ids=["5 MiB", "60 MiB"])
@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
async def test_many_that_are_too_long_are_refused_and_leave_nothing(
    stack: Stack, standing: Standing, request_: GenerateRequest, compression: grpc.Compression
) -> None:
    data = request_.SerializeToString()
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(stack.address, options=options) as channel, asyncio.timeout(PATIENCE_SECONDS):
        call: Any = channel.unary_stream(GENERATE)
        errors = await asyncio.gather(*(error_of(call(data, compression=compression)) for _ in range(8)))
    assert {error.code() for error in errors} == {grpc.StatusCode.RESOURCE_EXHAUSTED}


async def test_what_a_method_does_not_need_it_does_not_take(client: RawClient, standing: Standing) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await SessionServiceStub(client.channel).GetSession(GetSessionRequest(session_id="x" * 70_000))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error_info(error.value).reason == "MESSAGE_TOO_LARGE"


async def test_many_empty_messages_are_no_conversation(client: RawClient, standing: Standing) -> None:
    for count, why in ((5_000, "5000 entries: send at most 4096"), (2_000_000, "more than 262144 fields")):
        error = await error_of(client.generate(Chat(messages=[ChatMessage()] * count)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error_info(error).reason == "OUT_OF_RANGE"
        assert why in (error.details() or "")

"""Sessions that are kept between turns: how to look at one, and what their tests have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any, cast

import grpc
import pytest

from specd.errors import error_info
from specd.v1.generation_pb2 import GenerateResponse, StopConditions
from specd.v1.session_pb2 import GetSessionRequest, GetSessionResponse
from specd.v1.session_pb2_grpc import SessionServiceStub

# The most tokens between the end of a session and the end of its cached part: a proposal and the token before it.
MAX_LOST = 34

IGNORE_EOS = StopConditions(ignore_eos=True)
# A turn that is far from its end when its first message comes.
LONG: dict[str, Any] = {"max_tokens": 120, "num_draft_tokens": 0, "stop": IGNORE_EOS}
# The status of a call for a session that there is not.
GONE = (grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND")


async def get_session(sessions: SessionServiceStub, session_id: str) -> GetSessionResponse:
    response: GetSessionResponse = await sessions.GetSession(GetSessionRequest(session_id=session_id))
    return response


async def refusal(call: AsyncIterator[GenerateResponse] | Any) -> tuple[grpc.StatusCode, str]:
    """Return code and reason of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            async for _ in call:
                pass
        else:
            await cast(Awaitable[Any], call)
    return raised.value.code(), error_info(raised.value).reason

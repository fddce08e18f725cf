"""Check 23: what clients say, and where things are, is in no error, metric or log above debug."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.v1.generation_pb2 import Chat, ChatMessage, StopConditions
from specd.v1.session_pb2 import DeleteSessionRequest, GetSessionRequest
from specd.v1.session_pb2_grpc import SessionServiceStub
from tests.e2e.processes import read_metrics_text
from tests.raw_client import RawClient
from tests.security.standing import Standing

CANARY = "canary-7f3a91"


async def text_of_error(call: object) -> str:
    """Return all that an error tells a client."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call  # type: ignore[misc]
    return f"{raised.value.details()} {raised.value.trailing_metadata()}"


async def test_canaries_are_found_nowhere(stack: Stack, client: RawClient, standing: Standing) -> None:
    said = [
        {"prompt": CANARY},
        {"prompt": "import", "stop": StopConditions(strings=[CANARY])},
        {"prompt": "import", "prediction_text": CANARY},
    ]
    for fields in said:
        async for _ in client.generate(max_tokens=4, **fields):  # type: ignore[arg-type]
            pass
    errors = [
        await text_of_error(client.generate(CANARY * 4000, max_tokens=4)),
        await text_of_error(client.generate(CANARY, max_tokens=10**6)),
        await text_of_error(client.generate(Chat(messages=[ChatMessage(role=CANARY, content=CANARY)]), max_tokens=0)),
        await text_of_error(client.generate("x", session_id="nosuch", prediction_text=CANARY)),
    ]
    quoted = await text_of_error(client.generate("x", stop=StopConditions(strings=[CANARY * 50])))
    assert CANARY in quoted  # to its sender alone
    sessions = SessionServiceStub(client.channel)
    errors += [
        await text_of_error(sessions.GetSession(GetSessionRequest(session_id="nosuch"))),
        await text_of_error(sessions.DeleteSession(DeleteSessionRequest(session_id="nosuch"))),
    ]
    info = str(await client.model_info())
    metrics = [read_metrics_text(child) for child in stack.children]
    log = standing.new_log_lines()
    assert log
    for text in (*errors, *metrics, *log):
        assert CANARY not in text
    addresses = [child.facts["address"] for child in stack.children]
    for secret in ("/models/", *(str(Path(model).parent) for model in (EMBEDDED_TARGET, EMBEDDED_DRAFT))):
        assert secret not in info
        assert not any(secret in text for text in metrics)
    for text in errors:
        for secret in (*addresses, "/models/", "site-packages", "Traceback", "0x7f"):
            assert secret not in text
